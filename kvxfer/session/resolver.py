"""Find the route to a producer engine: look its card up in its directory, and join it with our own engine's.

Used by the control thread only. Unanswered questions are repeated until the fetches that wait for them give up.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.errors import PeerError
from kvxfer.geometry import Claim, Incompatible, route
from kvxfer.identity import Source
from kvxfer.session import messages as m
from kvxfer.session import wire
from kvxfer.session.links import Target
from kvxfer.session.values import Lane, Resolved

__all__ = ["Path", "Resolver"]

log = logging.getLogger("kvxfer.resolver")

REPEAT_S = 0.5
REDIAL_S = 5.0
"""A directory that is silent for so long is dialled anew, in case that only the connection is at fault."""


@dataclass(frozen=True)
class Path:
    """The links that lead to a source, and what the consumer's machine needs to know of them."""

    targets: tuple[Target, ...]
    resolved: Resolved


@dataclass
class _Query:
    """A question to a directory that is open since its last ``wanted``."""

    socket: wire.Socket
    dialled: float
    wanted: float
    asked: float


class Resolver:
    """Answers come from ``receive`` and ``tick`` as (source, path or the reason why there is none).

    ``patience``: seconds for which anybody waits for an answer.
    """

    def __init__(self, hub: wire.Hub, me: m.Member, patience: float) -> None:
        self._hub, self._me, self._patience = hub, me, patience
        self._queries: dict[Source, _Query] = {}
        self._wanted: dict[Source, Source | None] = {}  # source -> our own directory, if it matters
        self._own: dict[Source, tuple[m.Member, ...]] = {}  # our own engine's ranks, which live as long as we do

    def ask(self, source: Source, own: Source | None, now: float) -> str | None:
        """Begin to resolve; ``own`` is our engine's directory if it has more ranks than this one. Returns why that is
        not possible, if so."""
        self._wanted[source] = own
        try:
            for directory in (source, own):
                if directory is not None and directory not in self._own:
                    self._query(directory, now)
        except PeerError as e:
            return self._fail(source, f"directory {source}: {e}")
        return None

    def _query(self, directory: Source, now: float) -> None:
        q = self._queries.get(directory)
        if q is None:
            q = self._queries[directory] = _Query(self._dial(directory), now, now, now)
        q.wanted = now

    def _redial(self, directory: Source, q: _Query, now: float) -> None:
        log.warning("directory %s has not answered for %.0f s; dialling it anew", directory, now - q.dialled)
        silent, q.dialled, q.asked = q.socket, now, now
        with contextlib.suppress(PeerError):  # no socket is to be had now: the old one must do
            q.socket = self._dial(directory)
            self._hub.drop(silent)

    def _dial(self, directory: Source) -> wire.Socket:
        sock = self._hub.dial(wire.address(directory.host, directory.port))
        wire.send(sock, m.Lookup(m.PROTOCOL))
        return sock

    def receive(self, ready: set[wire.Socket], now: float) -> Iterator[tuple[Source, Path | str]]:
        for directory, q in [(d, q) for d, q in self._queries.items() if q.socket in ready]:
            frames = wire.receive(q.socket)
            if frames is None:
                continue
            self._close(directory)
            try:
                card = _card(frames[-1], directory)
            except PeerError as e:
                yield from self._failed(directory, str(e))
                continue
            if directory in self._wanted.values():
                self._own[directory] = card.members
                again = [s for s, own in self._wanted.items() if own == directory and s not in self._queries]
                for source in again:  # its card came first and was of no use without ours
                    self._query(source, now)
            own = self._wanted.get(directory)
            if directory in self._wanted and (own is None or own in self._own):
                del self._wanted[directory]
                yield directory, self._path(card, directory, self._own.get(own) if own else None)

    def _path(self, card: m.Card, source: Source, own: tuple[m.Member, ...] | None) -> Path | str:
        """The way to a source, or why there is none."""
        ours = [member.cache for member in own or (self._me,)]
        try:
            for member in card.members:
                member.cache.check()
            mine = route([member.cache for member in card.members], ours)[self._me.cache.rank]
            ranks = {member.cache.rank: member for member in card.members}
            targets = {rank: self._target(ranks[rank], claims) for rank, claims in sorted(mine.claims.items())}
        except (PeerError, Incompatible, ValueError, LookupError) as e:
            return f"engine {card.engine!r} at {source}: {e}"
        lanes = tuple(Lane(target.link, mine.readers[rank], rank) for rank, target in targets.items())
        return Path(tuple(targets.values()), Resolved(lanes))

    def _target(self, member: m.Member, claims: tuple[Claim, ...]) -> Target:
        common = tuple(name for name in self._me.backends if name in member.backends)
        if not common:
            theirs, ours = (" or ".join(map(repr, names)) for names in (member.backends, self._me.backends))
            raise PeerError(f"it uses back end {theirs}, this engine {ours}; configure the same on both")
        return Target(member.address, member.epoch, member.cache, claims, common)

    def tick(self, now: float) -> Iterator[tuple[Source, str]]:
        """Repeat unanswered questions; those for which nobody waits any more have failed."""
        for directory, q in list(self._queries.items()):
            if now - q.wanted >= self._patience:
                self._close(directory)
                yield from self._failed(directory, f"it did not answer within {self._patience:g} s")
            elif now - q.dialled >= REDIAL_S:
                self._redial(directory, q, now)
            elif now - q.asked >= REPEAT_S:
                q.asked = now
                wire.send(q.socket, m.Lookup(m.PROTOCOL))

    def next_tick(self) -> float | None:
        waits = (min(q.asked + REPEAT_S, q.wanted + self._patience) for q in self._queries.values())
        return min(waits, default=None)

    def _failed(self, directory: Source, reason: str) -> Iterator[tuple[Source, str]]:
        """All that depended on this directory have no route."""
        for source in [s for s, own in self._wanted.items() if directory in (s, own)]:
            yield source, self._fail(source, f"directory {directory}: {reason}")

    def _fail(self, source: Source, reason: str) -> str:
        self._wanted.pop(source, None)
        return reason

    def _close(self, directory: Source) -> None:
        self._hub.drop(self._queries.pop(directory).socket)


def _card(frame: bytes, directory: Source) -> m.Card:
    card = m.decode(frame)
    if isinstance(card, m.Refused):
        raise PeerError(f"it refused: {card.reason}")
    if not isinstance(card, m.Card):
        raise PeerError(f"it answered with a {type(card).__name__}")
    if card.protocol != m.PROTOCOL:
        raise PeerError(f"its protocol {card.protocol} is not ours ({m.PROTOCOL}); update one side")
    if directory.epoch and card.epoch != directory.epoch:
        raise PeerError("the engine there has restarted since it was named")
    return card
