"""Who is to blame: what a space raises, or returns against its contract, becomes an error that names the space."""

from __future__ import annotations

from kvxfer.errors import KvxferError
from kvxfer.failures import FailureKind
from kvxfer.fence import Fence
from kvxfer.memory.space import Space


class SpaceError(KvxferError):
    """A space failed, or broke its contract."""

    default = FailureKind.BACKEND_FAILED

    def __init__(self, space: type[Space], device: str, what: str) -> None:
        kind = device.partition(":")[0]
        super().__init__(
            f"the space for {device} ({space.__module__}:{space.__qualname__}) {what}; "
            f"`kvxfer conformance --space {kind}` tests it"
        )


def space_error(space: type[Space], device: str, call: str, error: BaseException) -> KvxferError:
    """Return the error for what a call of a space raised: kvxfer's own errors as they are."""
    if isinstance(error, KvxferError):
        return error
    return SpaceError(space, device, f"failed in {call}: {type(error).__name__}: {error}")


def checked_fence(space: type[Space], device: str, call: str, found: Fence) -> Fence:
    """Return what a call of a space returned, which must be a fence.

    Raises:
        SpaceError: It is not.
    """
    if not hasattr(found, "passed"):
        raise SpaceError(space, device, f"returned {found!r} from {call}, which must be a fence")
    return found


def checked_allocation(space: type[Space], device: str, call: str, nbytes: int, found: Space) -> Space:
    """Return what a space allocated, which must be one region of that size.

    Raises:
        SpaceError: It is not.
    """
    if not isinstance(found, Space):
        raise SpaceError(space, device, f"returned {found!r} from {call}, which must be a Space")
    if [r.nbytes for r in found.regions] != [nbytes]:
        sizes = " and ".join(str(r.nbytes) for r in found.regions) or "no"
        raise SpaceError(space, device, f"returned memory of {sizes} bytes from {call}({nbytes})")
    return found
