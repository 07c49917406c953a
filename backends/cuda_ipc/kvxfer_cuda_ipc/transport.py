"""The back end: links, batches and their completions."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import Any

from kvxfer import clock
from kvxfer.backend import Base, LivenessLinks, Memories
from kvxfer.backend.liveness import LINK_BYTES
from kvxfer.errors import TransportError
from kvxfer.geometry import Region
from kvxfer.transport import Batch, Capabilities, Fence, PlanBatch, Probe, Verb
from kvxfer_cuda_ipc import driver
from kvxfer_cuda_ipc.endpoint import Endpoint, Exported
from kvxfer_cuda_ipc.exports import Opened, export
from kvxfer_cuda_ipc.gpu import Gpu
from kvxfer_cuda_ipc.library import probe
from kvxfer_cuda_ipc.link import CopyJob, Link
from kvxfer_cuda_ipc.lowering import Lowering
from kvxfer_cuda_ipc.options import Options

RETRY_S = 0.0005
"""How soon to look again whether memory of a closed link is out of use."""

LOOK_S = 0.00003
"""How soon to look again whether a launch is over that should be by now."""

LATE_S = 0.001
"""How long to leave a batch alone at most that is late."""

EARLY_S = 0.0001
"""How long before its expected end a batch gets our full attention: a timer may wake us too late by this much."""


class CudaIpcTransport(Base[Endpoint, Link]):
    """Reads and writes GPU memory of another process of this host. ``Options`` says what can be set."""

    name = "cuda_ipc"
    contract = 2
    guarded = "always"
    tells_hosts = True
    costs = {"cuda": 10}
    capabilities = Capabilities(
        verbs=frozenset({Verb.READ, Verb.WRITE}),
        memory=frozenset({"cuda"}),
        run_bytes=32,  # even short runs go at a good part of the link's speed
        factored=True,
    )
    libraries = {"cuda-bindings": ("cuda-bindings",)}
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        super().__init__(agent, options)
        self._exported: dict[int, Exported] = {}
        self._ordinals: dict[int, int] = {}  # by memory
        self._gpus: dict[int, Gpu] = {}
        self._opened = Opened(lambda ordinal: self._gpus[ordinal].context)
        self._leaving: list[Link] = []  # disconnected, and perhaps still in use by a launch
        self._jobs: dict[CopyJob, None] = {}  # those that have begun, the oldest first
        self._ends: dict[Hashable, Link] = {}  # by what tells of the peer
        self._liveness = LivenessLinks("cuda-ipc", self.wakeup)

    @classmethod
    def probe(cls) -> Probe:
        return probe()

    def add_memory(self, memory: int, regions: Sequence[Region]) -> None:
        devices = {r.device for r in regions}
        if len(devices) > 1:
            raise TransportError(f"one memory is on one GPU, not on {', '.join(sorted(devices))}")
        for device in devices:
            ordinal = _ordinal(device)
            if ordinal not in self._gpus:
                self._gpus[ordinal] = self._open_gpu(ordinal)
            self._exported[memory] = export(memory, regions, self._gpus[ordinal].context)
            self._ordinals[memory] = ordinal

    def _open_gpu(self, ordinal: int) -> Gpu:
        return Gpu(driver.context(ordinal), self._options)

    def drop_memory(self, memory: int) -> None:
        self._ordinals.pop(memory, None)
        self._exported.pop(memory, None)

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        """Return an endpoint. Handles have no rights: a peer that can open one can write, too."""
        link = os.urandom(LINK_BYTES)
        self._liveness.offer(link)
        exported = tuple(e for number, e in self._exported.items() if number in memories)
        return Endpoint(self.agent, link, self._liveness.name, exported)

    def drop_endpoint(self, mine: Endpoint) -> None:
        self._liveness.withdraw(mine.link)

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        lowerings: dict[int, Lowering] = {}
        with self._liveness.connected(mine.link, theirs.link, theirs.socket, theirs.agent, self.control) as liveness:
            own = liveness.process.pid == os.getpid()
            try:
                for ordinal in self._gpus:
                    lowerings[ordinal] = Lowering(self.memories, self._reach(theirs, ordinal, own), theirs.agent)
            except BaseException:
                self._let_go(theirs, lowerings)
                raise
        link = self._ends[liveness] = Link(liveness, self._liveness, theirs, lowerings, self._jobs, self.complete)
        return link

    def _reach(self, peer: Endpoint, ordinal: int, own: bool) -> Memories:
        """All memories of the peer at the addresses by which a GPU reaches them."""
        remote, opened, count = Memories(), [], 0
        try:
            for memory in sorted(peer.memories, key=lambda m: m.number):
                regions = self._opened.open(peer, memory, ordinal, own)
                opened.append(memory)
                for _ in range(memory.number - count):
                    remote.add(())  # numbers that the peer has used and given up
                if remote.add(regions, self.capabilities.memory) != memory.number:
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

    def drop_link(self, number: int, link: Link) -> None:
        link.lose(f"the link to {link.peer.agent} was closed on this side")
        del self._ends[link.liveness]
        self._leaving.append(link)

    def start(self, number: int, link: Link, batch: Batch | PlanBatch, after: Fence | None) -> None:
        if batch.local not in self._ordinals:
            raise TransportError(f"memory {batch.local} is not registered, or has no regions")
        ordinal = self._ordinals[batch.local]
        if ordinal not in link.lowerings:
            raise TransportError(f"memory {batch.local} was registered after the link to {link.peer.agent} was made")
        launches = deque(link.lowerings[ordinal].launches(batch))
        link.submit(CopyJob(number, after, link, batch, self._gpus[ordinal], launches))

    start_plan = start

    def stop(self, number: int, link: Link) -> None:
        aborted = TransportError(f"the batch with {link.peer.agent} was aborted on this side")
        link.stop(link.flights[number], aborted)

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        for end in self._liveness.handle(readable):
            if end in self._ends and end.down is not None:
                self._ends[end].lose(end.down)
        over = self._over()
        for job in list(self._jobs):
            job.go_on()
            if job.last <= over[job.gpu] and not job.launches:
                del self._jobs[job]
                job.link.finish(job)
        self._leave()
        self._sleep()

    def shut_down(self) -> None:
        links = [*self.links.values(), *self._leaving]
        with ExitStack() as last:  # all of it, whatever fails
            for ordinal in self._gpus:
                last.callback(self._end_gpu, ordinal, links)
            last.callback(self._liveness.close)
        self._jobs.clear()

    def _end_gpu(self, ordinal: int, links: Sequence[Link]) -> None:
        """Wait for a GPU's copies, then unmap what they read. If they do not end, it stays mapped.

        A copy that lost its memory would take the GPU's context with it, which is the engine's too.
        """
        self._gpus[ordinal].close()
        for link in links:
            if ordinal in link.lowerings:
                self._let_go(link.peer, (ordinal,))

    def _over(self) -> dict[Gpu, int]:
        """For each GPU, the last launch that is over."""
        over: dict[Gpu, int] = {}
        until = self._patience()
        for gpu in self._gpus.values():
            try:
                over[gpu] = gpu.finished(until)
            except TransportError as e:
                # The GPU's context is lost and nothing runs in it any more.
                for job in self._jobs:
                    if job.gpu is gpu:
                        job.stop(e)
                        job.last = 0
                over[gpu] = 0
        return over

    def _leave(self) -> None:
        """Unmap the memory of peers whose links are closed and used by no launch any more."""
        if self._leaving:
            used = {id(job.link) for job in self._jobs}
            for link in [link for link in self._leaving if id(link) not in used]:
                self._leaving.remove(link)
                self._let_go(link.peer, link.lowerings)

    def _sleep(self) -> None:
        """Say when to poll next: shortly before a batch should be over, ever less often if it is late."""
        now, due = clock.now(), None
        for job in self._jobs:
            if job.last:
                end = self._expected(job)
                at = max(now + LOOK_S, end - EARLY_S, now + min((now - end) / 4, LATE_S))
                due = at if due is None else min(due, at)
        if self._leaving and due is None:
            due = now + RETRY_S
        self.wakeup.at(due)

    def _expected(self, job: CopyJob) -> float:
        """When a batch that was begun should be over."""
        return job.begun + job.nbytes / job.gpu.pace

    def _patience(self) -> float:
        """Until when to wait for what is over almost now: a timer could not wake us in time for it."""
        now = clock.now()
        for job in self._jobs:
            if job.last and abs(now - self._expected(job)) < EARLY_S:
                return now + 2 * EARLY_S
        return 0.0


def _ordinal(device: str) -> int:
    """Which GPU ``cuda:N`` is, as this process counts."""
    number = device.partition(":")[2] or "0"
    if not number.isdecimal():
        raise TransportError(f"{device!r} is no device: expected cuda:N")
    return int(number)
