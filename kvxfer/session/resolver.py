"""Find the route to a producer engine: look its card up in its directory, and join it with our own engine's.

Used by the control thread only. Unanswered questions are repeated until the fetches that wait for them give up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from kvxfer.errors import PeerError
from kvxfer.geometry import Incompatible, route
from kvxfer.session import messages as m
from kvxfer.session import wire
from kvxfer.session.links import Target
from kvxfer.session.values import Lane, Resolved, Source

__all__ = ["Path", "Resolver"]

REPEAT_S = 0.5
GIVE_UP_S = 60.0


@dataclass(frozen=True)
class Path:
    """The links that lead to a source, and what the consumer's machine needs to know of them."""

    targets: tuple[Target, ...]
    resolved: Resolved


@dataclass
class _Query:
    socket: zmq.Socket[bytes]
    began: float
    asked: float


class Resolver:
    """Answers come from ``receive`` as (source, path or the reason why there is none)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], me: m.Member, backend: str) -> None:
        self._context, self._me, self._backend = context, me, backend
        self._queries: dict[Source, _Query] = {}
        self._own: tuple[m.Member, ...] = ()
        self._own_source: Source | None = None

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [q.socket for q in self._queries.values()]

    def ask(self, source: Source, own: Source | None, now: float) -> None:
        """Begin to resolve; ``own`` is our engine's directory if it has more ranks than this one."""
        if own is not None and own != self._own_source and own not in self._queries:
            self._query(own, now)
            self._own, self._own_source = (), own
        if source not in self._queries:
            self._query(source, now)

    def _query(self, source: Source, now: float) -> None:
        q = _Query(wire.dial(self._context, wire.address(source.host, source.port)), now, now)
        self._queries[source] = q
        self._repeat(q, now)

    def _repeat(self, q: _Query, now: float) -> None:
        q.asked = now
        wire.send(q.socket, m.Lookup(m.PROTOCOL))

    def receive(self, now: float) -> Iterable[tuple[Source, Path | str]]:
        for source, q in list(self._queries.items()):
            frames = wire.receive(q.socket)
            if frames is None:
                continue
            try:
                card = m.decode(frames[-1])
                if not isinstance(card, m.Card):
                    raise PeerError(f"it answered with a {type(card).__name__}")
                if card.epoch != source.epoch:
                    raise PeerError("the engine there has restarted since it was named")
            except PeerError as e:
                self._close(source)
                yield source, f"directory {source}: {e}"
                continue
            if source == self._own_source:
                self._own = card.members
                self._close(source)
                continue
            yield from self._answer(source, card)

    def _answer(self, source: Source, card: m.Card) -> Iterable[tuple[Source, Path | str]]:
        if self._own_source is not None and not self._own:
            return  # our own card first; the question is repeated
        self._close(source)
        try:
            yield source, self._path(card)
        except (PeerError, Incompatible, ValueError) as e:
            yield source, f"engine {card.engine!r} at {source}: {e}"

    def _path(self, card: m.Card) -> Path:
        if card.backend != self._backend:
            raise PeerError(f"it uses back end {card.backend!r}, this engine {self._backend!r}; configure the same on both")
        for member in card.members:
            member.cache.check()
        ours = self._own or (self._me,)
        mine = route([x.cache for x in card.members], [x.cache for x in ours])[self._me.cache.rank]
        targets = []
        lanes = []
        for rank, claims in sorted(mine.claims.items()):
            member = card.member(rank)
            target = Target(member.address, member.epoch, member.cache, claims)
            targets.append(target)
            lanes.append(Lane(target.link, mine.readers[rank], rank))
        return Path(tuple(targets), Resolved(tuple(lanes)))

    def tick(self, now: float) -> Iterable[tuple[Source, str]]:
        """Repeat unanswered questions; those of long ago have failed."""
        for source, q in list(self._queries.items()):
            if now - q.began > GIVE_UP_S:
                self._close(source)
                yield source, f"directory {source} did not answer within {GIVE_UP_S:g} s"
            elif now - q.asked > REPEAT_S:
                self._repeat(q, now)

    def next_tick(self) -> float | None:
        return min((q.asked + REPEAT_S for q in self._queries.values()), default=None)

    def _close(self, source: Source) -> None:
        self._queries.pop(source).socket.close(0)

    def close(self) -> None:
        for q in self._queries.values():
            q.socket.close(0)
        self._queries.clear()
