"""The Mooncake back end: links and batches by number, one engine below them.

Nothing here spins. Mooncake's own threads move the bytes and answer peers; it cannot tell us of what has ended, so this
side asks in short intervals while batches are in flight, and does nothing when there are none.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from kvxfer.backend import Base
from kvxfer.backend.endpoint import new_token
from kvxfer.backend.inheritance import Uninherited
from kvxfer.errors import KvxferError, TransportError
from kvxfer.geometry.region import Region
from kvxfer.transport import Batch, Capabilities, Fence, Probe, Verb
from kvxfer_mooncake.cells import Cell, Cells
from kvxfer_mooncake.endpoint import Endpoint, exported, reaches_again
from kvxfer_mooncake.flight import Flight
from kvxfer_mooncake.library import LibraryEngine, load, version_of
from kvxfer_mooncake.link import Link
from kvxfer_mooncake.options import Options
from kvxfer_mooncake.peer import Peer
from kvxfer_mooncake.spans import Spans

__all__ = ["MooncakeTransport"]

BUDGET_S = 0.01
"""Seconds after which a call posts no more."""
LINGER_S = 0.01


class MooncakeTransport(Base[Endpoint, Link]):
    """One-sided reads and writes by Mooncake. See ``docs/backends/mooncake.md`` for what it opens and promises."""

    name = "mooncake"
    contract = 2
    inherits = frozenset({"advertise"})
    guarded = "never"
    libraries = {"mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")}
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        self._uninherited = Uninherited()
        self._engine = LibraryEngine(self._options)
        self._uninherited.look()
        self._capabilities = Capabilities(
            verbs=frozenset({Verb.READ, Verb.WRITE}),
            elastic=self._options.protocol == "tcp",  # an RDMA device pins
            run_bytes=1 << 16,
            may_block_s=0.05,
            abort="batch",
            quiet="later",
        )
        super().__init__(agent, options)
        self._spans = Spans(self._engine)
        self._cells = Cells(self._spans)
        self._registered: dict[int, tuple[Region, ...]] = {}
        self._offered: dict[bytes, Cell] = {}  # by token, for ends that are not connected
        self._peers: dict[str, Peer] = {}
        self._flights: dict[int, Flight] = {}
        self._lingering: list[Flight] = []
        self._closing: list[Link] = []  # closed, with a look under way

    @classmethod
    def probe(cls) -> Probe:
        try:
            load()
            LibraryEngine(Options()).close()
        except KvxferError as e:
            return Probe(False, str(e))
        facts = {"mooncake": version_of()}
        return Probe(True, f"Mooncake {facts['mooncake']} works", frozenset({"cpu"}), facts)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def add_memory(self, memory: int, regions: Sequence[Region]) -> None:
        self._spans.add(regions)
        self._registered[memory] = tuple(regions)
        for link in self.links.values():
            self._close_if_stale(link)

    def drop_memory(self, memory: int) -> None:
        self._spans.remove(self._registered.pop(memory))

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        """Mooncake keeps nothing from anybody: what is lent decides no more than what the peer is told of."""
        cell, token = self._cells.take(), new_token()
        cell.show(token)
        lent = exported(self.memories, memories)
        self._offered[token] = cell
        return Endpoint(self.agent[:256], self._options.protocol, self._engine.name, cell.address, token, lent)

    def drop_endpoint(self, mine: Endpoint) -> None:
        self._cells.give_back(self._offered.pop(mine.token))

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        if theirs.protocol != self._options.protocol:
            raise TransportError(
                f"peer {theirs.agent!r} uses Mooncake's protocol {theirs.protocol!r}, this side {self._options.protocol!r}; they must agree"
            )
        if any(link.their_token == theirs.token for link in self.links.values()):
            raise TransportError(
                f"the endpoint of peer {theirs.agent!r} is in use; it must call endpoint() for every link"
            )
        self._forget_peers(theirs.engine)
        peer = self._peers.get(theirs.engine)
        if peer is None or peer.error is not None:
            cell = self._cells.take() if peer is None else peer.cell
            peer = self._peers[theirs.engine] = Peer(theirs.engine, self._engine, theirs.cell, cell)
        self._uninherited.soon()
        link = Link(number, self._offered.pop(mine.token), mine, theirs, peer, time.monotonic())
        self._close_if_stale(link)
        return link

    def _close_if_stale(self, link: Link) -> None:
        """Close a link if its peer would reach memory that it was not lent: Mooncake goes by addresses, and some are registered again."""
        if reaches_again(link.lent, self._registered):
            link.close("memory that it had lent was given back and has been registered again")

    def _forget_peers(self, but: str) -> None:
        """Forget the peers to which no link leads, apart from one: those that have died never come back under their names."""
        used = {but, *(link.peer.name for link in self.links.values())}
        for name in [name for name, peer in self._peers.items() if name not in used and peer.settled]:
            self._cells.give_back(self._peers.pop(name).cell)

    def drop_link(self, number: int, link: Link) -> None:
        link.close("this side has closed it")
        if link.looking:
            self._closing.append(link)
        else:
            self._cells.give_back(link.cell)

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        assert batch.remote_offsets is not None  # it is one-sided
        lengths = np.asarray(batch.lengths, np.int64)
        here = self.memories.addresses(batch.local, batch.local_offsets, lengths)
        try:
            there = link.space.addresses(batch.remote, batch.remote_offsets, lengths)
        except TransportError as e:
            raise TransportError(f"on the side of {link}: {e}") from None
        self._flights[number] = Flight(number, batch.verb, link, here, there, lengths, after)

    def stop(self, number: int, link: Link) -> None:
        self._flights[number].give_up("it was aborted", time.monotonic())

    def batch_moved(self, number: int, link: Link) -> int:
        return self._flights[number].moved()

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        now = time.monotonic()
        self._uninherited.look(now)
        for number in list(self._flights):
            flight = self._flights.pop(number)
            end = flight.advance(self._engine, now, now + BUDGET_S)
            if end is None:
                self._flights[number] = flight  # next time the others come first
                continue
            self.complete(end)
            if not end.quiet:
                self._lingering.append(flight)
        for flight in [f for f in self._lingering if not f.linger(self._engine)]:
            self._lingering.remove(flight)
            self.quieted(flight.number)
        for link in list(self._closing):
            link.take_in(self._engine, now)
            if not link.looking:
                self._closing.remove(link)
                self._cells.give_back(link.cell)
        due = [f.due(now) for f in self._flights.values()]
        if self._lingering or self._closing:
            due.append(now + LINGER_S)
        self.wakeup.at(min(due, default=None))

    def shut_down(self) -> None:
        for link in self.links.values():
            link.close("this side has closed its back end")
        self._spans.clear()
        # The engine ends, and with it all requests, when no thread is in it any more.
        for peer in self._peers.values():
            peer.give_up()
        self._engine.close()
