"""Helpers for the ends of parts and back ends."""

from __future__ import annotations

from kvxfer.failures import Failure, FailureKind
from kvxfer.logs import logger
from kvxfer.protocol.values import Moved, PartRef
from kvxfer.transport import Transport

__all__ = ["backend_failed", "quieted", "shut", "unmoved"]

log = logger("kvxfer.data")


def shut(transport: Transport) -> bool:
    """Close a back end, whatever it raises; return whether it has closed, so that it touches no memory any more."""
    try:
        transport.close()
        return True
    except BaseException:
        log.exception("the back end did not close cleanly")
        return False


def unmoved(ref: PartRef) -> Moved:
    """Return the end of a part that has not begun because its link does not exist."""
    return Moved(ref, Failure(FailureKind.PEER_LOST, "the link is broken"), True, 0, collateral=True)


def quieted(ref: PartRef) -> Moved:
    """Return the second end of a part that was not quiet at its first, and is now."""
    return Moved(ref, Failure(FailureKind.CANCELLED, "it ended earlier"), True, 0)


def backend_failed(detail: str) -> Failure:
    """Return a failure of a back end."""
    return Failure(FailureKind.BACKEND_FAILED, detail)
