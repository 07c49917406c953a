"""Endpoints as no peer of ours makes them, with a checksum that is right."""

from __future__ import annotations

from typing import Any

import msgspec

from kvxfer.backend.endpoint import EndpointBase

__all__ = ["altered_as"]


def altered_as(kind: type[EndpointBase], endpoint: bytes, *, format: int | None = None, **changes: Any) -> bytes:
    """With other fields, or from a release that has another ``format``."""
    changed = msgspec.structs.replace(kind.decode(endpoint), **changes)
    if format is None:
        return changed.encode()
    newer = msgspec.defstruct(kind.__name__, [], bases=(kind,), namespace={"format": format}, frozen=True)
    return newer(*msgspec.structs.astuple(changed)).encode()
