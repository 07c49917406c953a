"""Where kvxfer's log lines go inside vLLM, which shows the lines of its own loggers and of others warnings only."""

from __future__ import annotations

import logging

__all__ = ["share"]


def share() -> None:
    """Send kvxfer's lines where vLLM's go, at vLLM's level. Does nothing where somebody has said what becomes of them."""
    ours, vllm = logging.getLogger("kvxfer"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(vllm.handlers)
        ours.setLevel(vllm.level)
