"""Memory that other processes may open, and memory of theirs that this one has opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvxfer.errors import TransportError
from kvxfer.geometry import Region
from kvxfer.logs import logger
from kvxfer_cuda_ipc.driver import Context
from kvxfer_cuda_ipc.endpoint import Allocation, Endpoint, Exported
from kvxfer_cuda_ipc.library import CudaError

log = logger(__name__)

# What this process has exported: its own handles cannot be opened in it, and need not be.
_ours: dict[bytes, tuple[Context, int]] = {}


def export(number: int, regions: Sequence[Region], context: Context) -> Exported:
    """Return what a peer must know of a memory.

    Raises:
        TransportError: Memory that cannot be shared.
    """
    known: dict[int, int] = {}
    allocations: list[Allocation] = []
    placed: list[tuple[int, int, int]] = []
    with context:
        for region in regions:
            base, size = _allocation(context, region)
            if base not in known:
                known[base] = len(allocations)
                allocations.append(Allocation(_share(context, base, region), size))
                _ours[allocations[-1].handle] = context, base
            # Asked last: what cannot be shared is often in pieces as well.
            if region.address + region.nbytes > base + size:
                raise TransportError(f"{region} does not lie within one allocation of {region.device}")
            placed.append((known[base], region.address - base, region.nbytes))
    return Exported(number, context.uuid, tuple(allocations), tuple(placed))


def _allocation(context: Context, region: Region) -> tuple[int, int]:
    try:
        return context.allocation(region.address)  # finds nothing in another GPU's memory
    except CudaError as e:
        raise TransportError(f"{region} is not memory of {region.device} ({e.name})") from e


def _share(context: Context, base: int, region: Region) -> bytes:
    try:
        return context.share(base)
    except CudaError as e:
        raise TransportError(
            f"{region} cannot be shared with another process ({e.name}): it does not come from cudaMalloc",
            advice="switch off expandable segments (PYTORCH_CUDA_ALLOC_CONF), sleep mode or the memory pool that it comes from, or "
            "choose another back end",
        ) from e


class Opened:
    """Allocations of other processes, mapped once for each GPU and unmapped when the last link lets go."""

    def __init__(self, contexts: Callable[[int], Context]) -> None:
        self._contexts = contexts
        self._mapped: dict[tuple[int, bytes], tuple[int, int]] = {}  # (ordinal, handle) -> address, uses

    def open(self, peer: Endpoint, memory: Exported, ordinal: int, own: bool) -> tuple[Region, ...]:
        """Return the peer's memory as regions at the addresses by which GPU ``ordinal`` reaches it.

        ``own``: whether the peer lives in this very process. Every call needs its ``close``.

        Raises:
            TransportError: That GPU cannot reach it.
        """
        context = self._contexts(ordinal)
        if context.reaches(memory.gpu) is False:
            raise TransportError(
                f"GPU {ordinal} has no peer access to the GPU of {peer.agent} (no NVLink, and PCIe does not allow it)",
                advice="choose another back end",
            )
        bases: list[int] = []
        try:
            for allocation in memory.allocations:
                bases.append(self._own(peer, allocation, context) if own else self._map(peer, allocation, context))
        except TransportError:
            self._unmap(context, [a.handle for a in memory.allocations[: len(bases)]])
            raise
        return tuple(Region(bases[at] + offset, n, f"cuda:{ordinal}") for at, offset, n in memory.regions)

    def close(self, memory: Exported, ordinal: int) -> None:
        """Let go of what ``open`` gave; no launch may use it any more."""
        self._unmap(self._contexts(ordinal), [a.handle for a in memory.allocations])

    def _map(self, peer: Endpoint, allocation: Allocation, context: Context) -> int:
        key = context.ordinal, allocation.handle
        address, uses = self._mapped.get(key, (0, 0))
        if not uses:
            try:
                with context:
                    address = context.open(allocation.handle)
            except CudaError as e:
                raise TransportError(
                    f"the GPU memory of {peer.agent} cannot be opened ({e.name}): it has ended, or the two run in "
                    "containers that do not share an IPC namespace (`--ipc=host`) or do not both see the GPUs"
                ) from e
        self._mapped[key] = address, uses + 1
        try:
            _check_size(peer, allocation, context, address)
        except BaseException:
            self._unmap(context, [allocation.handle])
            raise
        return address

    def _own(self, peer: Endpoint, allocation: Allocation, context: Context) -> int:
        """Memory of this very process, possibly on another GPU."""
        owner, base = _ours.get(allocation.handle, (None, 0))
        if owner is None:
            raise TransportError(f"{peer.agent} names memory that this process has not registered")
        if owner is not context:
            with context:
                context.use(owner)
        _check_size(peer, allocation, owner, base)
        return base

    def _unmap(self, context: Context, handles: Iterable[bytes]) -> None:
        for handle in handles:
            key = context.ordinal, handle
            if key not in self._mapped:
                continue  # our own
            address, uses = self._mapped.pop(key)
            if uses > 1:
                self._mapped[key] = address, uses - 1
            else:
                try:
                    with context:
                        context.unmap(address)
                except CudaError as e:  # the address is lost to us, and that is all
                    log.warning("GPU %d: %s", context.ordinal, e)


def _check_size(peer: Endpoint, allocation: Allocation, context: Context, address: int) -> None:
    """Compare what a peer says of an allocation with what the driver says: a copy beyond its end would take the GPU's context with it.

    Raises:
        TransportError: It is smaller than the peer says.
    """
    try:
        with context:
            base, size = context.allocation(address)
    except CudaError as e:
        raise TransportError(f"the GPU memory of {peer.agent} cannot be looked up ({e.name})") from e
    if base + size < address + allocation.nbytes:
        raise TransportError(
            f"{peer.agent} says that its GPU memory has {allocation.nbytes} bytes, and the driver says {base + size - address}"
        )
