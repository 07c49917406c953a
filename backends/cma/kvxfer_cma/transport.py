"""The back end: links, batches and their completions."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from kvxfer import clock
from kvxfer.backend import Base, CopyPool, Liveness, LivenessLinks
from kvxfer.backend.endpoint import new_token
from kvxfer.errors import PeerError, TransportError
from kvxfer.transport import Batch, Capabilities, Fence, Probe, Verb
from kvxfer_cma import ptrace, vm
from kvxfer_cma.copy import Copy, CopyStep
from kvxfer_cma.endpoint import Endpoint
from kvxfer_cma.link import CmaBatch, Lent, Link
from kvxfer_cma.options import Options
from kvxfer_cma.ring import Asker

BUDGET_S = 0.004
"""A poll starts no further step after this time."""


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
        self._copies: dict[CmaBatch, Copy] = {}  # of all links, in the order of their turns
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
            lent = self._lent[mine.link]
            link = Link(
                mine.link, liveness, self._lines, lent, asker, self._shares, self._copies, self._pool, self.complete
            )
        self._ends[mine.link] = link
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
        link.lose(f"the link to {link.peer} was closed on this side")
        del self._ends[link.mine]
        self._retract(link.mine)

    def _retract(self, link: bytes) -> None:
        self._lent.pop(link).wipe()

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        local = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths)
        link.submit(CmaBatch(number, after, link, batch, local))

    def stop(self, number: int, link: Link) -> None:
        link.end(link.flights[number], TransportError(f"the batch with {link.peer} was aborted on this side"))

    def batch_moved(self, number: int, link: Link) -> int:
        copy = self._copies.get(link.flights[number])
        return 0 if copy is None else copy.moved()

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        until = clock.now() + BUDGET_S
        while True:
            heard = self._listen(readable)
            more = self._steps(until) or heard
            if not more or clock.now() >= until:
                break
            readable = self.wakeup.clear()
        if more:
            self.wakeup.set()

    def _listen(self, readable: AbstractSet[Hashable]) -> bool:
        """Take in what peers say, and answer those that ask for our memory; return whether any has said something."""
        heard = False
        for end in self._lines.handle(readable):
            link = self._ends.get(end.mine)
            if link is None or link.broken is not None:
                continue
            heard |= bool(link.liveness.heard)
            try:
                link.hear(self.memories)
            except (PeerError, OSError) as e:
                link.lose(f"{link.peer} cannot be talked to: {e}")
            if link.liveness.down is not None:
                link.lose(link.liveness.down)
        return heard

    def shut_down(self) -> None:
        for lent in self._lent.values():
            lent.wipe()
        self._lines.close()
        self._pool.close()
        self._copies.clear()
        self._ends.clear()

    def _steps(self, until: float) -> bool:
        """Give copies a step each, one after the other, while there is time. True if any of them can go on at once."""
        more = False
        for job in list(self._copies):
            if clock.now() >= until:
                return True
            copy = self._copies.pop(job)
            self._copies[job] = copy  # next time the others come first
            try:
                step = copy.step()
            except Exception as e:  # whatever it is, it is how this batch ends
                job.link.end(job, e)
                continue
            if step is CopyStep.DONE:
                job.link.end(job)
            more |= step is CopyStep.MORE
        return more
