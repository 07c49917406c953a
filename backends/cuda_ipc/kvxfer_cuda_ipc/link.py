"""One link to another process of this host, and a batch on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer import clock
from kvxfer.backend import LinkBase, Liveness, LivenessLinks, Submitted
from kvxfer.errors import KvxferError, PeerError
from kvxfer.transport import Batch, Completion, Fence, PlanBatch
from kvxfer_cuda_ipc.endpoint import Endpoint
from kvxfer_cuda_ipc.gpu import Gpu
from kvxfer_cuda_ipc.lowering import Lowering
from kvxfer_cuda_ipc.tables import Launch


@dataclass(eq=False)
class CopyJob(Submitted):
    """A batch.

    ``launches`` are still to be started; ``last`` is the number of the last one that was, or 0, ``begun`` the time when the batch was, and
    ``nbytes`` are theirs. ``error``: how the batch will end, unless it is ``None``.
    """

    link: Link
    batch: Batch | PlanBatch
    gpu: Gpu
    launches: deque[Launch]
    last: int = 0
    begun: float = 0.0
    nbytes: int = 0
    error: Exception | None = None

    def go_on(self) -> None:
        """Start launches, as far as the GPU has room for them."""
        try:
            while self.launches and self.gpu.ready:
                self.last = self.gpu.start(self.launches[0], _event(self.after))
                self.nbytes += self.launches.popleft().nbytes
                self.after = None
        except Exception as e:  # whatever it is, it is how this batch ends
            self.stop(e)

    def stop(self, error: Exception) -> None:
        """Start nothing more. The batch ends when what was started is over: nothing can call it back."""
        self.error = self.error or error
        self.launches.clear()


class Link(LinkBase[CopyJob]):
    """A link to a peer.

    ``lowerings``: for each of our GPUs, which reaches the peer's memories at addresses of its own. ``jobs``: where to put batches that
    have begun, of which the owner calls ``go_on``, and ``finish`` when they are over.
    """

    def __init__(
        self,
        liveness: Liveness,
        lines: LivenessLinks,
        peer: Endpoint,
        lowerings: dict[int, Lowering],
        jobs: dict[CopyJob, None],
        done: Callable[[Completion], None],
    ) -> None:
        super().__init__(done)
        self.liveness, self.peer, self.lowerings = liveness, peer, lowerings
        self._lines, self._jobs = lines, jobs

    def failed(self, job: CopyJob, why: Exception) -> str:
        return f"{job.batch.verb} of {job.batch.nbytes} bytes with {self.peer.agent} failed: {why}"

    def greet(self) -> bool:
        return self.liveness.up

    def may(self, job: CopyJob) -> bool:
        return _event(job.after) is not None or super().may(job)

    def post(self, job: CopyJob) -> None:
        job.begun = clock.now()
        self._jobs[job] = None
        job.go_on()

    def stop(self, job: CopyJob, error: Exception) -> None:
        """Have a batch end soon."""
        if job.number in self.waiting:
            self.end(job, error)
        else:
            job.stop(error)

    def finish(self, job: CopyJob) -> None:
        """End a batch whose launches are all over."""
        self.liveness.check()
        if job.error is None and self.liveness.down is not None:
            job.error = PeerError(self.liveness.down)
        self.end(job, job.error)

    def bye(self, cause: KvxferError, says: str | None) -> None:
        self._lines.hang_up(self.liveness)
        for job in self.posted:
            job.stop(cause)


def _event(fence: Fence | None) -> int | None:
    """Return the CUDA event of a fence as a number, if it has one that we know how to read."""
    event = None if fence is None else fence.event
    for name in ("cuda_event", "handle", "ptr"):  # PyTorch, cuda.core, CuPy
        if hasattr(event, name):
            return int(getattr(event, name))
    return event if isinstance(event, int) else None
