"""The NIXL back end: links and batches by number, one agent below them.

Nothing here spins. NIXL's progress thread sleeps on UCX's descriptor and does what peers ask for; it cannot tell us of
what has come, so this side looks at batches in flight in short intervals, and at nothing when there are none.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from kvxfer.backend import CopyPool
from kvxfer.backend.host import network_namespace
from kvxfer.backend.liveness import LINK_BYTES, Lines
from kvxfer.backend.wakeup import Wakeup
from kvxfer.errors import KvxferError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer_nixl.agent import Agent
from kvxfer_nixl.endpoint import Endpoint
from kvxfer_nixl.flight import Flight
from kvxfer_nixl.library import has_gpu, load
from kvxfer_nixl.link import Link, Peers
from kvxfer_nixl.options import Options
from kvxfer_nixl.reach import Reach
from kvxfer_nixl.space import Space

__all__ = ["NixlTransport"]

BUDGET_S = 0.015
"""A call starts no more pieces after so long."""
DRAIN_S = 1.0
"""How long ``close`` waits for NIXL to be done: ended in the middle of a READ over TCP, UCX 1.23 can abort the *peer*."""
LINGER_S = 0.05


class NixlTransport(Transport):
    """One-sided reads and writes by NIXL. See ``docs/backends/nixl.md`` for what its plugins need and promise."""

    name = "nixl"
    contract = 1
    inherits = frozenset({"listen"})
    guarded = "loopback"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self._options = Options.parse(options)
        # So that NIXL's log tells who it is, and no other process ever has the name.
        name = f"{re.sub(r'[^0-9A-Za-z_.-]', '_', agent)[:64]}~{secrets.token_hex(8)}"
        self._nixl = Agent(name, self._options)
        self._peers = Peers(self._nixl)
        memory = _memory_kinds(self._nixl)
        self._reach = Reach.of(self._options, memory)
        verbs = self._options.verbs or ({"read", "write"} if self._reach.host else {"write"})
        self._capabilities = Capabilities(
            verbs=frozenset(map(Verb, verbs)),
            memory=memory,
            # A descriptor costs 5 us on a GPU, whose link moves a megabyte meanwhile; on a CPU, a system call.
            run_bytes=4 << 20 if "cuda" in memory else 2048,
            may_block_s=0.05,
            abort="batch",
            quiet="backend_reset",
        )
        self._within = network_namespace()
        self._owner = threading.get_ident()
        self._closed = False
        self._space = Space(memory)
        self._tokens: dict[int, Any] = {}
        self._issued: dict[str, str] = {}
        self._links: dict[int, Link] = {}
        self._ends: dict[str, Link] = {}
        self._flights: dict[int, Flight] = {}
        self._lingering: list[Flight] = []
        self._ended: list[Completion] = []
        self._next_link, self._next_batch = 0, 0
        self._wakeup = Wakeup()
        self._lines = Lines("nixl", self._wakeup)
        self._pool = CopyPool(self._options.posting, "kvxfer-nixl")

    @classmethod
    def probe(cls) -> Probe:
        try:
            library = load()
            facts = {"nixl": f"{library.version} ({library.package})"}
            agent = Agent("probe", Options())
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

    def register(self, regions: Sequence[Region]) -> int:
        self._check()
        cuda, device = self._space.check(regions)
        token = self._nixl.register(regions, cuda, device) if regions else None
        memory = self._space.add(regions)
        self._tokens[memory] = token
        return memory

    def deregister(self, memory: int) -> None:
        self._check()
        for flight in [*self._flights.values(), *self._lingering]:
            if flight.memory == memory:
                raise TransportError(
                    f"memory {memory} is in use by batch {flight.number} with {flight.link}; abort it first, and if that "
                    "does not make the memory quiet, close the back end"
                )
        self._space.remove(memory)
        token = self._tokens.pop(memory)
        if token is not None:
            self._nixl.deregister(token)

    def endpoint(self) -> bytes:
        return self.endpoint_lending(self._tokens, True)

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        """NIXL's keys have no rights: who has one can write, too, where the carrier asks for one at all."""
        self._check()
        end = secrets.token_bytes(LINK_BYTES)
        metadata = self._nixl.metadata(*(self._tokens[m] for m in memories if self._tokens.get(m) is not None))
        lent = self._space.describe(memories)
        data = Endpoint(
            self.agent[:256],
            self._options.plugin,
            self._reach.here,
            self._within,
            end,
            self._lines.name,
            lent,
            metadata,
        ).encode()
        self._lines.offer(end)
        self._issued[end.hex()] = ""
        return data

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check()
        own, there = Endpoint.decode(mine), Endpoint.decode(theirs)
        if own.name not in self._issued:
            raise TransportError("the first endpoint is not one of ours, or is in use; call endpoint() for every link")
        if there.plugin != self._options.plugin:
            raise TransportError(
                f"peer {there.agent!r} uses NIXL's plugin {there.plugin}, this side {self._options.plugin}; they must agree"
            )
        if Verb.READ in self._capabilities.verbs and not self._reach.includes(there.host):
            raise TransportError(
                f"UCX has nothing but TCP to reach peer {there.agent!r}, and over TCP a reader that dies can take the process that "
                'it reads from along; set "verbs": ["write"] in the options of back end \'nixl\' on both sides (or name "read" '
                "there, which allows it), or use another back end"
            )
        if any(link.their_end == there.name for link in self._links.values()):
            raise TransportError(
                f"the endpoint of peer {there.agent!r} is in use; it must call endpoint() for every link"
            )
        try:
            link = Link(self._next_link, own.name, there, self._peers)
        except TransportError as e:
            raise TransportError(f"cannot connect to peer {there.agent!r}: {e}") from e
        if (own.host, own.within) == (there.host, there.within):
            link.line = self._lines.connect(own.end, there.end, there.line, repr(there.agent))
        self._next_link += 1
        self._links[link.number] = self._ends[link.end] = link
        for message in self._issued.pop(link.end):
            link.hear(message)
        return link.number

    def withdraw(self, endpoint: bytes) -> None:
        self._check()
        withdrawn = Endpoint.decode(endpoint)
        self._issued.pop(withdrawn.name, None)
        self._lines.withdraw(withdrawn.end)

    def disconnect(self, peer: int) -> None:
        self._check()
        link = self._link(peer)
        del self._links[peer], self._ends[link.end]
        link.close("this side has closed the link")
        if link.line is not None:
            self._lines.hang_up(link.line)
        self._wakeup.set()

    def lost(self, peer: int) -> str | None:
        link = self._links.get(peer)
        return None if link is None or link.error is None else str(link.error)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._check()
        link = self._link(batch.peer)
        if batch.verb not in self._capabilities.verbs:
            offered = " and ".join(sorted(self._capabilities.verbs)).upper()
            raise TransportError(f"this back end 'nixl' does not {batch.verb.upper()}; it offers {offered}")
        if batch.remote_offsets is None:
            raise TransportError(f"a {batch.verb.upper()} needs remote_offsets")
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
        number, self._next_batch = self._next_batch, self._next_batch + 1
        operation: Literal["read", "write"] = "read" if batch.verb is Verb.READ else "write"
        flight = Flight(number, operation, link, batch.local, local, remote, after, self._pool)
        self._flights[number] = flight
        self._listen()
        now = time.monotonic()
        self._advance(flight, now)
        self._schedule(now)
        return number

    def poll(self) -> list[Completion]:
        self._check()
        self._lines.handle(self._wakeup.clear())
        self._listen()
        now = time.monotonic()
        for flight in list(self._flights.values()):
            self._advance(flight, now)
        self._lingering = [f for f in self._lingering if f.linger(self._nixl)]
        ended, self._ended = self._ended, []
        self._schedule(now)
        return ended

    def abort(self, batch: int) -> None:
        self._check()
        flight = self._flights.get(batch)
        if flight is not None:
            flight.give_up("it was aborted", time.monotonic())
            self._wakeup.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(TransportError):  # so that nobody is told who has told us already
            self._listen()
        for link in self._links.values():
            link.close("this side has closed its back end")
        going = [*self._flights.values(), *self._lingering]
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until and (going := [f for f in going if f.linger(self._nixl)]):
            time.sleep(0.0005)
        for flight in going:
            flight.drop(self._nixl)
        self._pool.close()
        self._nixl.close()
        self._lines.close()
        self._wakeup.close()

    def fileno(self) -> int:
        return self._wakeup.fileno()

    def _advance(self, flight: Flight, now: float) -> None:
        end = flight.advance(self._nixl, now, now + BUDGET_S)
        if end is None:
            return
        del self._flights[flight.number]
        self._ended.append(end)
        if not end.quiet:
            self._lingering.append(flight)

    def _listen(self) -> None:
        """Take in greetings and goodbyes. A peer may send them before we have connected to it."""
        for message in self._nixl.heard():
            kind, name = message[:1].decode("ascii", "replace"), message[1:].decode("ascii", "replace")
            if name in self._ends:
                self._ends[name].hear(kind)
            elif name in self._issued and kind not in self._issued[name]:
                self._issued[name] += kind

    def _schedule(self, now: float) -> None:
        """Have ``fileno`` polled readable when there is something to look at."""
        if self._ended:
            self._wakeup.set()
        due = [f.due(now) for f in self._flights.values()]
        if self._lingering:
            due.append(now + LINGER_S)
        self._wakeup.at(min(due, default=None))

    def _link(self, peer: int) -> Link:
        if peer not in self._links:
            raise TransportError(f"there is no link {peer}; it was closed, or never made")
        return self._links[peer]

    def _check(self) -> None:
        if self._closed:
            raise TransportError(f"the back end of {self.agent!r} is closed")
        if threading.get_ident() != self._owner:
            raise TransportError("back end 'nixl' serves the thread that made it, and no other")


def _memory_kinds(agent: Agent) -> frozenset[str]:
    """``cuda`` where there is a GPU: NIXL's plugins say that they move its memory whether there is one or not."""
    found = {"cpu"} if "DRAM_SEG" in agent.kinds else set[str]()
    return frozenset(found | {"cuda"} if has_gpu() and "VRAM_SEG" in agent.kinds else found)
