"""The NIXL back end: links and batches by number, one agent below them.

Nothing here spins. NIXL's progress thread sleeps on UCX's descriptor and does what peers ask for; it cannot tell us of
what has come, so this side looks at batches in flight in short intervals, and at nothing when there are none.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, Literal

import msgspec
import numpy as np

from kvxfer import clock
from kvxfer.backend import Base, CopyPool, Liveness, LivenessLinks, ucx
from kvxfer.backend.endpoint import new_token
from kvxfer.backend.inheritance import Uninherited
from kvxfer.backend.introduction import Introduction
from kvxfer.errors import KvxferError, PeerError, TransportError
from kvxfer.geometry.region import Region
from kvxfer.transport import Batch, Capabilities, Fence, Probe, Verb
from kvxfer_nixl.agent import LibraryAgent
from kvxfer_nixl.carriers import copies_directly
from kvxfer_nixl.endpoint import Endpoint
from kvxfer_nixl.flight import Flight
from kvxfer_nixl.library import has_gpu, load
from kvxfer_nixl.link import Link, Peer, Peers
from kvxfer_nixl.options import Options
from kvxfer_nixl.reach import Reach
from kvxfer_nixl.space import RegisteredSpace, one_device

BUDGET_S = 0.015
"""Seconds after which a call starts no more pieces."""
DRAIN_S = 1.0
"""How long ``close`` waits for NIXL to be done: ended in the middle of a READ over TCP, UCX 1.23 can abort the *peer*."""
LINGER_S = 0.05


class NixlTransport(Base[Endpoint, Link]):
    """One-sided reads and writes by NIXL. See ``docs/backends/nixl.md`` for what its plugins need and promise."""

    name = "nixl"
    contract = 2
    inherits = frozenset({"listen"})
    guarded = "loopback"
    costs = {"cpu": 20, "cuda": 20}
    exclusive = frozenset({"ucx"})  # it brings one, and with two at work progress has crashed
    libraries = {"nixl": ("nixl",)}
    tells = ucx.TELLS
    endpoint_type = Endpoint
    carried_by = staticmethod(ucx.carried_by)

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        self._uninherited = Uninherited()
        # So that NIXL's log tells who it is, and no other process ever has the name.
        name = f"{re.sub(r'[^0-9A-Za-z_.-]', '_', agent)[:64]}~{secrets.token_hex(8)}"
        self._host, self._network = both = _start(name, self._options)
        self._nixl = [agent for agent in both if agent is not None]
        self._uninherited.look()
        self._peers = {id(agent): Peers(agent) for agent in self._nixl}
        memory = _memory_kinds(self._nixl[0])
        self._reach = Reach.of(self._options, memory)
        verbs = self._options.verbs or ({"read", "write"} if self._reach.somebody else {"write"})
        self._capabilities = Capabilities(
            verbs=frozenset(map(Verb, verbs)),
            memory=memory,
            # A descriptor costs 5 us on a GPU, whose link moves 2 MiB meanwhile; on a CPU, a system call.
            run_bytes=2 << 20 if "cuda" in memory else 4096,
            may_block_s=0.05,
            abort="batch",
            quiet="later",
        )
        super().__init__(agent, options)
        self._space = RegisteredSpace(self.memories)
        self._tokens: dict[int, list[Any]] = {}  # of each agent
        self._issued: dict[str, str] = {}  # what was heard for an endpoint that is not used yet
        self._shown: dict[str, list[int]] = {}  # the memories that such an endpoint shows
        self._ends: dict[str, Link] = {}
        self._flights: dict[int, Flight] = {}
        self._lingering: list[Flight] = []
        self._liveness = LivenessLinks("nixl", self.wakeup)
        self._pool = CopyPool(self._options.posting, "kvxfer-nixl")

    @classmethod
    def fallbacks(cls, options: Mapping[str, Any]) -> Collection[str]:
        parsed = Options.parse(options)
        return ucx.fallbacks(parsed.listen, parsed.given_settings) if parsed.plugin == "UCX" else ()

    @classmethod
    def probe(cls) -> Probe:
        try:
            library = load()
            facts = {"nixl": f"{library.version} ({library.package})"}
            options = Options()
            agent = LibraryAgent("probe", options, options.ucx_settings)
            try:
                facts["plugins"] = ", ".join(agent.plugins)
                facts["ucx"] = library.ucx_version
                memory = _memory_kinds(agent)
                facts["reads"] = Reach.of(Options(listen="0.0.0.0"), memory).words  # what this host would allow
            finally:
                agent.close()
        except KvxferError as e:
            return Probe(False, str(e))
        return Probe(
            True,
            f"NIXL {facts['nixl']} works with its plugin UCX on {' and '.join(sorted(memory))} memory",
            memory,
            facts,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_memory(self, memory: int, regions: Sequence[Region]) -> None:
        cuda, device = one_device(regions)
        tokens: list[Any] = []
        try:
            for agent in self._nixl if regions else ():
                tokens.append(agent.register(regions, cuda, device))
        except BaseException:
            for agent, token in zip(self._nixl, tokens, strict=False):
                agent.deregister(token)
            raise
        self._tokens[memory] = tokens
        self._space.add(memory, regions)

    def drop_memory(self, memory: int) -> None:
        self._space.remove(memory)
        for agent, token in zip(self._nixl, self._tokens.pop(memory), strict=False):
            agent.deregister(token)

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        """NIXL's keys have no rights: a peer that has one can write, too, where the carrier asks for one at all."""
        end = new_token()
        mine = Endpoint(
            self.agent[:256],
            self._options.plugin,
            end,
            self._liveness.name,
            self._space.describe(memories),
            b"" if self._network is None else self._metadata(self._network, memories),
        )
        self._liveness.offer(end)
        self._issued[mine.name], self._shown[mine.name] = "", list(memories)
        return mine

    def _metadata(self, agent: LibraryAgent, memories: Collection[int]) -> bytes:
        """Return what a peer has to know of one of our agents for these memories, as far as they are still there."""
        at = self._nixl.index(agent)
        return agent.metadata(*(tokens[at] for m in memories if (tokens := self._tokens.get(m))))

    def drop_endpoint(self, mine: Endpoint) -> None:
        del self._issued[mine.name], self._shown[mine.name]
        self._liveness.withdraw(mine.end)

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        if theirs.plugin != self._options.plugin:
            raise TransportError(
                f"peer {theirs.agent!r} uses NIXL's plugin {theirs.plugin}, this side {self._options.plugin}; they must agree"
            )
        if any(link.their_end == theirs.name for link in self.links.values()):
            raise TransportError(
                f"the endpoint of peer {theirs.agent!r} is in use; it must call endpoint() for every link"
            )
        with self._liveness.connected_if_here(
            mine.end, theirs.end, theirs.line, repr(theirs.agent), self.control
        ) as liveness:
            link = self._make_link(number, mine, theirs, liveness)
        self._ends[link.end] = link
        del self._shown[link.end]
        self._uninherited.soon()
        for message in self._issued.pop(link.end):
            link.hear(message)
        return link

    def _make_link(self, number: int, mine: Endpoint, theirs: Endpoint, liveness: Liveness | None) -> Link:
        """Return a link to a peer, which is on this host if there is a socket to it (``liveness``)."""
        host, shown = self._host, self._shown[mine.name]

        def choose(told: bytes | None) -> Peer:
            agent, metadata = (self._network, theirs.metadata) if told is None else (host, told)
            if agent is None or not metadata:
                raise TransportError(
                    "it runs on another host, or as another user or in another namespace, where no shared memory is used, and "
                    f"{'this side' if agent is None else 'it'} has no network: 'listen' is a loopback address, or 'TLS' allows none"
                )
            if Verb.READ in self._capabilities.verbs and not self._reach.includes(agent is host):
                raise TransportError(
                    f"UCX has nothing but TCP to reach peer {theirs.agent!r}, and over TCP a reader that dies can end the process that "
                    "it reads from",
                    advice='set "verbs": ["write"] in the options of back end \'nixl\' on both sides, or use another back end',
                )
            return self._peers[id(agent)].connect(metadata, liveness is not None)

        address = None if host is None else partial(self._metadata, host, shown)
        try:
            introduction = None if liveness is None else Introduction(liveness, address)
            return Link(number, mine.name, theirs, liveness, introduction, choose)
        except (TransportError, PeerError) as e:
            raise TransportError(f"cannot connect to peer {theirs.agent!r}: {e}") from e

    def drop_link(self, number: int, link: Link) -> None:
        del self._ends[link.end]
        link.close("this side has closed the link")
        if link.liveness is not None:
            self._liveness.hang_up(link.liveness)

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        assert batch.remote_offsets is not None  # it is one-sided
        lengths, here, there = (
            np.ascontiguousarray(a, np.int64) for a in (batch.lengths, batch.local_offsets, batch.remote_offsets)
        )
        local = self._space.rows(batch.local, here, lengths)
        try:
            remote = link.space.rows(batch.remote, there, lengths)
        except TransportError as e:
            raise TransportError(f"on the side of {link}: {e}") from None
        if len(lengths) and not lengths.all():
            some = lengths > 0
            local, remote = (local[0], local[1][some]), (remote[0], remote[1][some])
        operation: Literal["read", "write"] = "read" if batch.verb is Verb.READ else "write"
        flight = Flight(number, operation, link, local, remote, after, self._pool)
        self._flights[number] = flight
        self._listen()
        now = clock.now()
        self._advance(flight, now)
        self._schedule(now)

    def stop(self, number: int, link: Link) -> None:
        self._flights[number].give_up("it was aborted", clock.now())

    def batch_moved(self, number: int, link: Link) -> int:
        return self._flights[number].moved()

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        self._liveness.handle(readable)
        for link in self.links.values():
            if link.peer is None or link.liveness in readable:
                _ = link.broken  # takes in what the peer has said
        self._listen()
        now = clock.now()
        self._uninherited.look(now)
        for flight in list(self._flights.values()):
            self._advance(flight, now)
        for flight in [f for f in self._lingering if not f.linger()]:
            self._lingering.remove(flight)
            self.quieted(flight.number)
        self._schedule(now)

    def shut_down(self) -> None:
        with suppress(TransportError):  # so that nobody is told who has told us already
            self._listen()
        for link in self.links.values():
            link.close("this side has closed its back end")
        going = [*self._flights.values(), *self._lingering]
        until = clock.now() + DRAIN_S
        while clock.now() < until and (going := [f for f in going if f.linger()]):
            clock.wait(0.0005)
        for flight in going:
            flight.drop()
        self._pool.close()
        try:
            _close(self._nixl)
        finally:
            self._liveness.close()

    def _advance(self, flight: Flight, now: float) -> None:
        end = flight.advance(now, now + BUDGET_S)
        if end is None:
            return
        del self._flights[flight.number]
        self.complete(end)
        if not end.quiet:
            self._lingering.append(flight)

    def _listen(self) -> None:
        """Take in greetings and goodbyes. A peer may send them before we have connected to it."""
        for message in chain.from_iterable(agent.heard() for agent in self._nixl):
            kind, name = message[:1].decode("ascii", "replace"), message[1:].decode("ascii", "replace")
            if name in self._ends:
                self._ends[name].hear(kind)
            elif name in self._issued and kind not in self._issued[name]:
                self._issued[name] += kind

    def _schedule(self, now: float) -> None:
        """Have ``poll`` called when there is something to look at."""
        due = [f.due(now) for f in self._flights.values()]
        if self._lingering:
            due.append(now + LINGER_S)
        self.wakeup.at(min(due, default=None))


def _start(name: str, options: Options) -> tuple[LibraryAgent | None, LibraryAgent | None]:
    """Start an agent for peers of this host and one for others, of which one may be missing (``kvxfer.backend.ucx.split``)."""
    contexts = options.contexts
    settings = [contexts.host, contexts.network]
    host = contexts.host
    if host is not None and contexts.network is not None and not (has_gpu() or copies_directly(host["TLS"])):
        if Reach.of(msgspec.structs.replace(options, verbs=None), ()).network:
            settings[0] = None  # an RDMA device reads by itself, and shared memory would not
    started: list[LibraryAgent | None] = []
    try:
        for one in settings:
            started.append(None if one is None else LibraryAgent(name, options, one))
    except BaseException:
        _close([agent for agent in started if agent is not None])
        raise
    return started[0], started[1]


def _close(agents: Iterable[LibraryAgent]) -> None:
    """Close all of these.

    Raises:
        TransportError: One of them cannot be closed.
    """
    with ExitStack() as closing:
        for agent in agents:
            closing.callback(agent.close)


def _memory_kinds(agent: LibraryAgent) -> frozenset[str]:
    """``cuda`` where there is a GPU: NIXL's plugins say that they move its memory whether there is one or not."""
    found = {"cpu"} if "DRAM_SEG" in agent.kinds else set[str]()
    return frozenset(found | {"cuda"} if has_gpu() and "VRAM_SEG" in agent.kinds else found)
