"""Show kvxfer's log lines inside vLLM, which by default shows only warnings of loggers other than its own."""

from __future__ import annotations

import logging

__all__ = ["share"]


def share() -> None:
    """Send kvxfer's lines where vLLM's go, at vLLM's level; do nothing if kvxfer's logger is configured already."""
    ours, vllm = logging.getLogger("kvxfer"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(vllm.handlers)
        ours.setLevel(vllm.level)
