"""The back end: links, batches and their completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from kvxfer.backend import Base, CopyPool, Liveness, LivenessLinks
from kvxfer.backend.endpoint import new_token
from kvxfer.errors import PeerError, TransportError
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe, Verb
from kvxfer_cma import ptrace, vm
from kvxfer_cma.copy import Copy, CopyStep, DirectCopy
from kvxfer_cma.endpoint import Endpoint
from kvxfer_cma.link import Lent, Link
from kvxfer_cma.options import Options
from kvxfer_cma.ring import Asker, Relayed

BUDGET_S = 0.004
"""A poll starts no further step after this time."""

RETRY_S = 0.001
"""How soon to ask a fence again."""


@dataclass
class _Job:
    """A batch on its way.

    ``begin``: makes its copy, which begins once the fence ``after`` has passed; it returns ``None`` until the peer has said where its
    memory is.
    """

    link: Link
    begin: Callable[[], Copy | None]
    after: Fence | None
    copy: Copy | None = None


class CmaTransport(Base[Endpoint, Link]):
    """Reads and writes CPU memory of another process of this host. ``Options`` says what can be set."""

    name = "cma"
    contract = 2
    guarded = "always"
    tells_hosts = True
    costs = {"cpu": 10}
    capabilities = Capabilities(
        verbs=frozenset({Verb.READ, Verb.WRITE}),
        elastic=True,
        run_bytes=1024,  # a piece costs the kernel about as much as copying these
        may_block_s=0.05,
    )
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        if reason := vm.unsupported():
            raise TransportError(f"the cma back end does not work here: {reason}")
        if self._options.allow_ptrace:
            ptrace.allow_any()
        super().__init__(agent, options)
        self._lines = LivenessLinks("cma", self.wakeup)
        self._lent: dict[bytes, Lent] = {}  # by the ends of links that were offered
        self._ends: dict[bytes, Link] = {}
        self._jobs: dict[int, _Job] = {}
        self._pool = CopyPool(self._options.threads, "kvxfer-cma")
        self._shares = self._options.mode != "vm"

    @classmethod
    def probe(cls) -> Probe:
        if reason := vm.unsupported():
            return Probe(False, reason)
        said, facts = ptrace.facts()
        return Probe(True, said, cls.capabilities.memory, facts)

    def drop_memory(self, memory: int) -> None:
        for lent in self._lent.values():
            lent.take_back(memory)

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        link = new_token()
        self._lines.offer(link)
        self._lent[link] = Lent(frozenset(memories), writable)
        return Endpoint(self.agent, link, self._lines.name, self._shares)

    def drop_endpoint(self, mine: Endpoint) -> None:
        """Nobody gets in by this end of a link any more."""
        self._lines.withdraw(mine.link)
        self._retract(mine.link)

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        with self._lines.connected(mine.link, theirs.link, theirs.line, theirs.agent, self.control) as liveness:
            asker = self._asker(theirs, liveness)
            link = Link(mine.link, liveness, self._lent[mine.link], asker, self._shares)
        self._ends[mine.link] = link
        if link.asker is None:
            link.ask()
        return link

    def _asker(self, peer: Endpoint, liveness: Liveness) -> Asker | None:
        """Return what has copies made through shared memory, or ``None`` if they can be made directly.

        Raises:
            TransportError: They cannot, and the options of either side allow no others.
        """
        if not self._shares or self._options.mode == "auto":
            refused = vm.refusal(liveness.process, peer.agent)
            if refused is None:
                return None
            if not self._shares:
                raise TransportError(refused)
        if not peer.shares:
            raise TransportError(
                f"{peer.agent} runs with `mode: vm`, and this side cannot, or is set not to, copy from its memory directly",
                advice="set `mode: auto` there",
            )
        return Asker(liveness)

    def drop_link(self, number: int, link: Link) -> None:
        self._hang_up(link)
        del self._ends[link.mine]
        self._retract(link.mine)
        for batch in [n for n, job in self._jobs.items() if job.link is link]:
            self._end(batch, PeerError(f"the link to {link.peer} was closed on this side"))

    def _hang_up(self, link: Link, why: str | None = None) -> None:
        link.liveness.down = link.liveness.down or why
        self._lines.hang_up(link.liveness)

    def _retract(self, link: bytes) -> None:
        self._lent.pop(link).wipe()

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        assert batch.remote_offsets is not None  # it is one-sided
        local = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths)

        def begin() -> Copy | None:
            assert batch.remote_offsets is not None
            write, remote, lengths = batch.verb is Verb.WRITE, batch.remote_offsets, batch.lengths
            if link.asker is not None:
                return Relayed(link.asker, write, local, batch.remote, remote, lengths)
            if link.remote is None:
                return None
            if batch.remote not in link.processes:
                raise TransportError(f"{link.peer} has no memory {batch.remote}")
            try:
                there = link.remote.addresses(batch.remote, remote, lengths)
            except TransportError as e:
                raise TransportError(f"at {link.peer}: {e}") from None
            return DirectCopy(link.processes[batch.remote], self._pool, write, local, there, lengths)

        job = _Job(link, begin, after)
        job.copy = begin()
        self._jobs[number] = job

    def stop(self, number: int, link: Link) -> None:
        self._end(number, TransportError(f"the batch with {link.peer} was aborted on this side"))

    def batch_moved(self, number: int, link: Link) -> int:
        copy = self._jobs[number].copy
        return 0 if copy is None else copy.moved()

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        until = time.monotonic() + BUDGET_S
        while True:
            heard = self._listen(readable)
            more = self._steps(until) or heard
            if not more or time.monotonic() >= until:
                break
            readable = self.wakeup.clear()
        if more:
            self.wakeup.set()

    def _listen(self, readable: AbstractSet[Hashable]) -> bool:
        """Take in what peers say, and answer those that ask for our memory; return whether any has said something."""
        self._lines.handle(readable)
        heard = False
        for source in readable:
            link = self._ends.get(source.mine) if isinstance(source, Liveness) else None
            if link is not None and link.broken is None:
                heard |= bool(link.liveness.heard)
                try:
                    link.hear(self.memories)
                except (PeerError, OSError) as e:
                    self._hang_up(link, f"{link.peer} cannot be talked to: {e}")
        return heard

    def shut_down(self) -> None:
        for lent in self._lent.values():
            lent.wipe()
        self._lines.close()
        self._pool.close()
        self._jobs.clear()

    def _steps(self, until: float) -> bool:
        """Give batches a step each, one after the other, while there is time. True if any of them can go on at once."""
        more = later = False
        for number in list(self._jobs):
            if time.monotonic() >= until:
                return True
            job = self._jobs.pop(number)
            self._jobs[number] = job  # next time the others come first
            try:
                step = self._step(job)
            except Exception as e:  # whatever it is, it is how this batch ended
                self._end(number, e)
                continue
            if step is CopyStep.DONE:
                self._end(number, None)
            more |= step is CopyStep.MORE
            later |= step is CopyStep.LATER
        if later:
            self.wakeup.at(time.monotonic() + RETRY_S)
        return more

    def _step(self, job: _Job) -> CopyStep:
        if (error := job.link.broken) is not None:
            raise error
        if job.copy is None:
            job.copy = job.begin()
            if job.copy is None:
                return CopyStep.WAIT
        if job.after is not None and not job.after.passed():
            return CopyStep.LATER
        job.after = None
        return job.copy.step()

    def _end(self, number: int, error: Exception | None) -> None:
        copy = self._jobs.pop(number).copy
        if copy is not None:
            copy.drop()
        self.complete(Completion(number, error))
