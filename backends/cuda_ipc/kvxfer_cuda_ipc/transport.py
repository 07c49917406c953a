"""The back end: links, batches and their completions."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from kvxfer.errors import PeerError, TransportError
from kvxfer.geometry import Region
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer.transport.host import host
from kvxfer.transport.lines import Line, Lines
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup
from kvxfer_cuda_ipc import driver
from kvxfer_cuda_ipc.endpoint import LINK_BYTES, Endpoint, Exported, process
from kvxfer_cuda_ipc.exports import Opened, export
from kvxfer_cuda_ipc.gpu import Gpu
from kvxfer_cuda_ipc.lowering import Lowering
from kvxfer_cuda_ipc.options import Options
from kvxfer_cuda_ipc.probe import probe
from kvxfer_cuda_ipc.tables import Launch

__all__ = ["CudaIpcTransport"]

CAPABILITIES = Capabilities(
    verbs=frozenset({Verb.READ, Verb.WRITE}),
    memory=frozenset({"cuda"}),
    same_host=True,
    run_bytes=32,  # even short runs go at a good part of the link's speed
    factored=True,
)

RETRY_S = 0.0005
"""How soon to ask again whether a fence without an event has passed."""

LOOK_S = 0.00003
"""How soon to look again whether a launch is over that should be by now."""

LATE_S = 0.001
"""How long to leave a batch alone at most that is late."""

EARLY_S = 0.0001
"""How long before it should be over a batch gets our full attention: a timer may wake us so much too late."""


@dataclass(eq=False)
class _Link:
    """``lowerings``: for each of our GPUs, which reaches the peer's memories at addresses of its own."""

    line: Line
    peer: Endpoint
    lowerings: dict[int, Lowering]


@dataclass(eq=False)
class _Job:
    """A batch. ``launches`` are still to be started; ``last`` is the number of the last one that was."""

    link: _Link
    memory: int
    gpu: Gpu
    after: Fence | None
    launches: deque[Launch]
    last: int = 0
    begun: float | None = None
    nbytes: int = 0
    error: Exception | None = None


class CudaIpcTransport(Transport):
    """Reads and writes GPU memory of another process of this host. ``Options`` says what can be set."""

    name: ClassVar[str] = "cuda_ipc"
    guarded = "always"
    contract: ClassVar[int] = 1

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self._options = Options.parse(options)
        self._host = host()
        self._memories = Memories()
        self._exported: dict[int, Exported] = {}
        self._ordinals: dict[int, int] = {}  # by memory
        self._gpus: dict[int, Gpu] = {}
        self._opened = Opened(lambda ordinal: self._gpus[ordinal].context)
        self._links: dict[int, _Link] = {}
        self._leaving: list[_Link] = []  # disconnected, and perhaps still in use by a launch
        self._numbers = 0
        self._jobs: dict[int, _Job] = {}
        self._wakeup = Wakeup()
        self._lines = Lines("cuda-ipc", self._wakeup)
        self._closed = False

    @classmethod
    def probe(cls) -> Probe:
        return probe()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def register(self, regions: Sequence[Region]) -> int:
        self._check_open()
        Memories().add(regions, CAPABILITIES.memory)  # before any of them is handed to CUDA
        kinds = {r.device for r in regions}
        if len(kinds) > 1:
            raise TransportError(f"one memory is on one GPU, not on {', '.join(sorted(kinds))}")
        exported, ordinal = None, None
        for device in kinds:
            ordinal = _ordinal(device)
            if ordinal not in self._gpus:
                self._gpus[ordinal] = self._open_gpu(ordinal)
            exported = export(0, regions, self._gpus[ordinal].context)
        number = self._memories.add(regions, CAPABILITIES.memory)
        if exported is not None and ordinal is not None:
            self._ordinals[number] = ordinal
            self._exported[number] = Exported(number, exported.gpu, exported.allocations, exported.regions)
        return number

    def _open_gpu(self, ordinal: int) -> Gpu:
        return Gpu(driver.context(ordinal), self._options)

    def deregister(self, memory: int) -> None:
        self._check_open()
        if any(job.memory == memory for job in self._jobs.values()):
            raise TransportError(f"memory {memory} is used by a batch in flight: abort it or wait for its end")
        self._memories.remove(memory)
        self._ordinals.pop(memory, None)
        self._exported.pop(memory, None)

    def endpoint(self) -> bytes:
        return self.endpoint_lending(self._exported, True)

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        """Handles have no rights: who can open one can write, too."""
        self._check_open()
        link = os.urandom(LINK_BYTES)
        self._lines.offer(link)
        return Endpoint(
            self.agent,
            self._host,
            process(),
            link,
            self._lines.name,
            tuple(e for number, e in self._exported.items() if number in memories),
        ).encode()

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check_open()
        link, peer = Endpoint.decode(mine).link, Endpoint.decode(theirs)
        if not self._lines.unused(link):
            raise TransportError("connect: `mine` is no endpoint of this transport, or was used before")
        if peer.host != self._host:
            raise TransportError(
                f"{peer.agent} runs on another host; the cuda_ipc back end works on one only, choose one that uses a "
                "network"
            )
        lowerings: dict[int, Lowering] = {}
        for ordinal in self._gpus:
            try:
                lowerings[ordinal] = Lowering(self._memories, self._reach(peer, ordinal), peer.agent)
            except TransportError:
                self._let_go(peer, lowerings)
                raise
        self._numbers += 1
        self._links[self._numbers] = _Link(
            self._lines.connect(link, peer.link, peer.socket, peer.agent), peer, lowerings
        )
        self._wakeup.set()
        return self._numbers

    def _reach(self, peer: Endpoint, ordinal: int) -> Memories:
        """All memories of the peer at the addresses by which a GPU reaches them."""
        remote, opened, count = Memories(), [], 0
        try:
            for memory in sorted(peer.memories, key=lambda m: m.number):
                regions = self._opened.open(peer, memory, ordinal)
                opened.append(memory)
                for _ in range(memory.number - count):
                    remote.add(())  # numbers that the peer has used and given up
                if remote.add(regions, CAPABILITIES.memory) != memory.number:
                    raise TransportError(f"{peer.agent} sent two memories of one number")
                count = memory.number + 1
        except TransportError:
            for memory in opened:
                self._opened.close(memory, ordinal)
            raise
        return remote

    def _let_go(self, peer: Endpoint, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            for memory in peer.memories:
                self._opened.close(memory, ordinal)

    def withdraw(self, endpoint: bytes) -> None:
        self._check_open()
        self._lines.withdraw(Endpoint.decode(endpoint).link)

    def disconnect(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        self._lines.hang_up(link.line)
        self._leaving.append(link)
        self._wakeup.set()

    def lost(self, peer: int) -> str | None:
        link = self._links.get(peer)
        return None if link is None else link.line.down

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._check_open()
        link = self._links.get(batch.peer)
        if link is None:
            raise TransportError(f"there is no link {batch.peer}: it was closed, or never made")
        if batch.verb not in CAPABILITIES.verbs:
            raise TransportError(f"the cuda_ipc back end reads and writes, this is a {batch.verb}")
        if batch.local not in self._ordinals:
            raise TransportError(f"memory {batch.local} is not registered, or has no regions")
        ordinal = self._ordinals[batch.local]
        if ordinal not in link.lowerings:
            raise TransportError(f"memory {batch.local} was registered after the link to {link.peer.agent} was made")
        launches = deque(link.lowerings[ordinal].launches(batch))
        job = _Job(link, batch.local, self._gpus[ordinal], after, launches)
        self._numbers += 1
        self._jobs[self._numbers] = job
        self._advance(job)
        self._wakeup.set()
        return self._numbers

    def poll(self) -> list[Completion]:
        self._check_open()
        self._lines.handle(self._wakeup.clear())
        over = self._over()
        ended: list[Completion] = []
        for number, job in list(self._jobs.items()):
            self._advance(job)
            if job.last <= over[job.gpu] and not job.launches and (job.begun is not None or job.error is not None):
                del self._jobs[number]
                ended.append(Completion(number, self._verdict(job)))
        self._leave()
        self._sleep()
        return ended

    def abort(self, batch: int) -> None:
        job = self._jobs.get(batch)
        if job is not None:
            self._stop(job, TransportError(f"the batch with {job.link.peer.agent} was aborted on this side"))
            self._wakeup.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:  # all of it, whatever fails
            last.callback(self._wakeup.close)
            for link in [*self._links.values(), *self._leaving]:
                last.callback(self._let_go, link.peer, link.lowerings)
            for gpu in self._gpus.values():
                last.callback(gpu.close)
            last.callback(self._lines.close)
        self._jobs.clear()
        self._links.clear()

    def fileno(self) -> int:
        self._check_open()
        return self._wakeup.fileno()

    def _advance(self, job: _Job) -> None:
        """Start what can be started."""
        if job.error is not None or (job.begun is not None and not job.launches):
            return
        line = job.link.line
        if line.down is not None:
            self._stop(job, PeerError(line.down))
            return
        if not line.up:
            return
        try:
            event = None
            if job.after is not None:
                event = _event(job.after)
                if event is None and not job.after.passed():
                    return
            if job.begun is None:
                job.begun = time.monotonic()
            while job.launches and job.gpu.ready:
                job.last = job.gpu.start(job.launches[0], event)
                job.nbytes += job.launches.popleft().nbytes
                event = job.after = None
        except Exception as e:  # whatever it is, it is how this batch ends
            self._stop(job, e)

    def _over(self) -> dict[Gpu, int]:
        """For each GPU, the last launch that is over."""
        over: dict[Gpu, int] = {}
        until = self._patience()
        for gpu in self._gpus.values():
            try:
                over[gpu] = gpu.finished(until)
            except TransportError as e:
                # The GPU's context is lost and nothing runs in it any more.
                for job in self._jobs.values():
                    if job.gpu is gpu:
                        self._stop(job, TransportError(f"a batch with {job.link.peer.agent}: {e}"))
                        job.last = 0
                over[gpu] = 0
        return over

    def _verdict(self, job: _Job) -> Exception | None:
        """How a job ended whose launches are all over."""
        job.link.line.check()
        if job.error is None and job.link.line.down is not None:
            return PeerError(job.link.line.down)
        return job.error

    @staticmethod
    def _stop(job: _Job, error: Exception) -> None:
        """Start nothing more. The job ends when what was started is over: nothing can call it back."""
        job.error = job.error or error
        job.launches.clear()

    def _leave(self) -> None:
        """Unmap the memory of peers whose links are closed and used by no launch any more."""
        if self._leaving:
            used = {id(job.link) for job in self._jobs.values()}
            for link in [link for link in self._leaving if id(link) not in used]:
                self._leaving.remove(link)
                self._let_go(link.peer, link.lowerings)

    def _sleep(self) -> None:
        """Say when to poll next: shortly before a batch should be over, ever less often if it is late; or when a fence
        could have passed."""
        now, due = time.monotonic(), None
        for job in self._jobs.values():
            if job.last and job.begun is not None:
                end = self._expected(job)
                at = max(now + LOOK_S, end - EARLY_S, now + min((now - end) / 4, LATE_S))
            elif job.after is not None and job.link.line.up:
                at = now + RETRY_S
            else:
                continue
            due = at if due is None else min(due, at)
        if self._leaving and due is None:
            due = now + RETRY_S
        self._wakeup.at(due)

    def _expected(self, job: _Job) -> float:
        """When a batch that was begun should be over."""
        return (job.begun or 0.0) + job.nbytes / job.gpu.pace

    def _patience(self) -> float:
        """Until when to wait for what is over almost now: a timer could not wake us in time for it."""
        now = time.monotonic()
        for job in self._jobs.values():
            if job.last and abs(now - self._expected(job)) < EARLY_S:
                return now + 2 * EARLY_S
        return 0.0

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this transport is closed")


def _ordinal(device: str) -> int:
    """Which GPU ``cuda:N`` is, as this process counts."""
    number = device.partition(":")[2] or "0"
    if not number.isdecimal():
        raise TransportError(f"{device!r} is no device: expected cuda:N")
    return int(number)


def _event(fence: Fence | None) -> int | None:
    """The CUDA event of a fence as a number, if it has one that we know how to read."""
    event = None if fence is None else fence.event
    for name in ("cuda_event", "handle", "ptr"):  # PyTorch, cuda.core, CuPy
        if hasattr(event, name):
            return int(getattr(event, name))
    return event if isinstance(event, int) else None
