"""One link to another process of this host, and a batch on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvxfer.backend import Liveness
from kvxfer.errors import PeerError
from kvxfer.transport import Fence
from kvxfer_cuda_ipc.endpoint import Endpoint
from kvxfer_cuda_ipc.gpu import Gpu
from kvxfer_cuda_ipc.lowering import Lowering
from kvxfer_cuda_ipc.tables import Launch


@dataclass(eq=False)
class Link:
    """A link to a peer.

    ``lowerings``: for each of our GPUs, which reaches the peer's memories at addresses of its own.
    """

    liveness: Liveness
    peer: Endpoint
    lowerings: dict[int, Lowering]

    @property
    def broken(self) -> PeerError | None:
        """Why it cannot be used any more."""
        return None if self.liveness.down is None else PeerError(self.liveness.down)


@dataclass(eq=False)
class CopyJob:
    """A batch.

    ``launches`` are still to be started; ``last`` is the number of the last one that was, or 0, ``begun`` the time when the first was, and
    ``nbytes`` are theirs. ``error``: how the batch will end, unless it is ``None``.
    """

    link: Link
    gpu: Gpu
    after: Fence | None
    launches: deque[Launch]
    last: int = 0
    begun: float | None = None
    nbytes: int = 0
    error: Exception | None = None
