"""One link to another process of this host, and the way into that process's memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvxfer.backend import Memories
from kvxfer.errors import PeerError, TransportError
from kvxfer_cma import vm
from kvxfer_cma.endpoint import Endpoint
from kvxfer_cma.options import Options
from kvxfer_cma.ring import Asker

__all__ = ["Link", "way_in"]


@dataclass(frozen=True)
class Link:
    """A link to a peer.

    ``remote`` are the peer's memories, at the addresses that they have there, and ``processes`` a way into each, unless ``asker`` has
    copies made through shared memory.
    """

    mine: bytes
    peer: str
    remote: Memories
    processes: Mapping[int, vm.Process]
    asker: Asker | None

    @property
    def broken(self) -> PeerError | None:
        """Why no batch can move; without an asker that is never known before one has failed."""
        return None if self.asker is None else self.asker.broken


def way_in(peer: Endpoint, options: Options, pid_namespace: int) -> dict[int, vm.Process] | None:
    """Return the way into each of the peer's memories, or ``None`` if copies have to go through shared memory.

    Raises:
        TransportError: There is no way in, and the options allow no other.
    """
    if options.mode == "shm":
        return None
    if peer.pid_namespace != pid_namespace:
        if options.mode == "auto":
            return None
        raise TransportError(
            f"{peer.agent} runs in another pid namespace (container): share one (`--pid=container:NAME`, "
            "Kubernetes `shareProcessNamespace`), or use `mode: shm`"
        )
    processes = {m.number: vm.Process(peer.pid, peer.agent, m.key_address, m.key) for m in peer.memories}
    try:
        for process in processes.values():
            process.ready()
    except vm.AccessRefused as e:
        if options.mode == "auto":
            return None
        raise TransportError(str(e)) from e
    except PeerError:
        return processes  # gone already: its batches will say so
    return processes
