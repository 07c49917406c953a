"""Find the route to a producer engine: look its descriptor up in its directory, and join it with the own engine's.

Used by the control thread only. Checking the caches that a descriptor describes, and joining them with the own ones, takes
time and is done on another thread. Unanswered questions are repeated. Once a directory has been silent for too long, peers
that ask for it are told so at once, while the question is repeated until it is answered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from kvxfer import clock
from kvxfer import facts as f
from kvxfer.control import sockets
from kvxfer.control.broken import unanswered
from kvxfer.control.outbound import Target
from kvxfer.data.policy import unlinkable
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Incompatible, ShardAssignment, route
from kvxfer.geometry.assignment import name
from kvxfer.identity import Source
from kvxfer.logs import logger
from kvxfer.protocol import messages as m
from kvxfer.protocol.timers import Timers
from kvxfer.protocol.values import LinkId, RankRoute, Resolved

K = FailureKind
T = TypeVar("T")

log = logger("kvxfer.resolver")

REPEAT_S = 0.5
SHORT = 4096
"""The most bytes of an answer that is decoded on the control thread, because it cannot describe many ranks."""
REDIAL_S = 5.0
"""A directory that is silent for these seconds, or for a third of the patience, is dialled again, in case only the connection is at
fault."""


PROBE_S = 1.0
"""Seconds between two questions to a directory that is known to be silent."""
KEPT_S = 600.0
"""Seconds after which a silent directory is forgotten, if nobody has asked for it."""
MAX_SILENT = 64
"""The most directories that are known to be silent; for one more, the one that was asked for longest ago is forgotten."""
MAX_FOUND = 1024
"""The most sources whose links are remembered."""

CHECK_S = 2.0
"""The most seconds for which a thread may compute to check a descriptor. While the host stands still, nothing is computed."""
MAX_READ = 256
"""The most ranks of one engine that this rank reads from."""


@dataclass(frozen=True)
class Path:
    """The links that lead to a source, and what the consumer's machine needs to know about them."""

    targets: tuple[Target, ...]
    resolved: Resolved


Paths = Iterator[tuple[Source, Path | Failure]]


class Examine(Protocol):
    """How a resolver has a job done off its thread; see ``Resolver``."""

    def __call__(self, weight: int, job: Callable[[], T], done: Callable[[T | Failure], Paths], /) -> bool: ...


@dataclass
class _Query:
    """An open question to a directory."""

    connection: sockets.ControlConnection | None  # the connection on which it was asked; ``None`` while there is none
    dialled: float  # when that connection was made
    since: float  # when the question was first asked
    wanted: float  # when the answer was last asked for
    silent: Failure | None = None  # the failure for those who want it, once the directory has been silent for too long
    excuse: Failure | None = None  # what the directory answered instead of its descriptor, or why it could not be asked
    met: bool = False  # a connection was made, and is given up

    @property
    def connected(self) -> bool:
        """Whether its host has ever taken a connection."""
        return self.met or (self.connection is not None and self.connection.connected)


class Resolver:
    """Finds the paths to sources.

    ``receive``, ``tick`` and ``done`` (below) give the answers: a source with its path, or the failure why there is none.

    Args:
        sockets: The agent's control sockets.
        me: This agent's rank.
        patience: Seconds after which a directory that has not answered counts as silent.
        facts: What all KV of this engine depends on; there is no path to an engine that states other facts.
        examine: ``examine(weight, job, done)`` does a job on another thread, and calls ``done`` with its result, or the
            failure why there is none. The answers of ``done`` count like those of ``receive``. Returns false if too
            many jobs wait already.
    """

    def __init__(
        self,
        sockets: sockets.ControlSockets,
        me: m.RankDescriptor,
        patience: float,
        facts: Mapping[str, str],
        examine: Examine,
    ) -> None:
        self._sockets, self._me, self._patience, self._examine = sockets, me, patience, examine
        self.facts = facts
        self._queries: dict[Source, _Query] = {}
        self._clock: Timers[Source] = Timers()
        self._wanted: dict[Source, Source | None] = {}  # source -> this engine's own directory, if it is needed
        self._links: dict[Source, frozenset[LinkId]] = {}  # the links to each source, the latest last
        # The ranks of this engine, which live as long as this agent.
        self._own: dict[Source, tuple[m.RankDescriptor, ...]] = {}

    def ask(self, source: Source, own: Source | None, now: float) -> Failure | None:
        """Begin to resolve the directory of a producer engine; return why that is not possible, or ``None``.

        ``own`` is this engine's directory if it has several ranks, else ``None``.
        """
        self._wanted[source] = own
        try:
            for directory in (source, own):
                if directory is not None and directory not in self._own:
                    self._query(directory, now)
        except PeerError as e:
            return self._fail(source, Failure.of(e, peer=f"directory {source}"))
        return None

    def _query(self, directory: Source, now: float) -> None:
        q = self._queries.get(directory)
        if q is None:
            q = self._queries[directory] = _Query(self._dial(directory), now, now, now)
            self._clock.set(directory, now + REPEAT_S)
        q.wanted = now
        if q.silent is not None:
            raise PeerError(f"{q.silent.detail}, and has not since", kind=q.silent.kind)

    def _redial(self, directory: Source, q: _Query, now: float) -> None:
        q.met = q.connected
        silent, q.connection, q.dialled = q.connection, None, now
        if silent is not None:
            if q.silent is None:
                log.warning("directory %s has not answered; dialling it again", directory)
            self._sockets.drop(silent)
        with contextlib.suppress(PeerError):  # none can be made now
            q.connection = self._dial(directory)

    def _dial(self, directory: Source) -> sockets.ControlConnection:
        connection = self._sockets.dial(sockets.address(directory.host, directory.port), directory, m.MAX_BYTES)
        connection.send(m.Lookup(m.PROTOCOL))
        return connection

    def hung_up(self, directory: Source, connection: sockets.ControlConnection) -> Iterator[tuple[Source, Failure]]:
        """Handle the loss of a connection; another is made when the question is repeated.

        If nobody listens there, or the name does not exist, the engine of that epoch will not come back, because a directory
        lives as long as its epoch. If one side does not accept the other's key, asking again does not help either.
        """
        q = self._queries.get(directory)
        if q is None or q.connection is not connection:
            return
        kind = K.OVERLOADED if connection.short else K.PEER_UNREACHABLE
        q.connection, q.excuse = None, Failure(kind, str(connection.lost))
        if connection.denied:
            self._close(directory)
            yield from self._failed(directory, Failure(K.REFUSED, str(connection.lost)))
        elif connection.refused and directory.epoch:
            self._close(directory)
            yield from self._failed(
                directory, Failure(K.NO_SUCH_ENGINE, f"the engine there is gone: {connection.lost}")
            )

    def doubt(self, link: LinkId, why: Failure, now: float) -> None:
        """Record that a link has gone silent; the directories of its engine count as silent too, until they answer."""
        for source in [source for source, links in self._links.items() if link in links]:
            del self._links[source]
            with contextlib.suppress(PeerError):
                self._query(source, now)
                self._silence(self._queries[source], why)

    def discount_stall(self, seconds: float, now: float) -> None:
        """Do not count seconds up to ``now`` in which this process did not run as silence of directories."""
        for q in self._queries.values():
            q.since = min(q.since + seconds, now)

    def _silence(self, q: _Query, why: Failure) -> None:
        q.silent = why
        silent = [(q.wanted, directory) for directory, q in self._queries.items() if q.silent is not None]
        if len(silent) > MAX_SILENT:
            self._close(min(silent, key=lambda known: known[0])[1])

    def receive(self, directory: Source, frame: bytes) -> Paths:
        """Handle a directory's answer."""
        q = self._queries.get(directory)
        if q is None:
            return
        if len(frame) <= SHORT and (excuse := _excuse(frame)):  # the question is repeated
            q.excuse = excuse
            return
        self._close(directory)
        if not self._examine(len(frame), partial(_descriptor, frame, directory), partial(self._checked, directory)):
            yield from self._failed(directory, Failure(K.OVERLOADED, "too many directories are being examined"))

    def _checked(self, directory: Source, descriptor: m.EngineDescriptor | Failure) -> Paths:
        """Handle a directory's descriptor that has been checked, or why it is refused."""
        now = clock.now()
        if isinstance(descriptor, Failure):
            yield from self._failed(directory, descriptor)
            return
        if directory in self._wanted.values():
            self._own[directory] = descriptor.ranks
            again = [s for s, own in self._wanted.items() if own == directory and s not in self._queries]
            for source in again:  # its descriptor came first, and was of no use without the own one
                self._query(source, now)
        own = self._wanted.get(directory)
        if directory in self._wanted and (own is None or own in self._own):
            path = partial(self._path, descriptor, directory, self._own.get(own) if own else None)
            if not self._examine(len(descriptor.ranks), path, partial(self._found, directory)):
                yield from self._failed(directory, Failure(K.OVERLOADED, "too many directories are being examined"))

    def _found(self, directory: Source, path: Path | Failure) -> Paths:
        if self._wanted.pop(directory, self) is not self:
            if isinstance(path, Path):
                self._links.pop(directory, None)
                self._links[directory] = frozenset(target.link for target in path.targets)
                if len(self._links) > MAX_FOUND:
                    del self._links[next(iter(self._links))]
            yield directory, path

    def _path(
        self, descriptor: m.EngineDescriptor, source: Source, own: tuple[m.RankDescriptor, ...] | None
    ) -> Path | Failure:
        """Return the path to a source, or why there is none. Any thread: it uses nothing that changes."""
        ours = [rank.cache for rank in own or (self._me,)]
        try:
            if (why := f.difference(self.facts, descriptor.facts, "at the producer")) is not None:
                raise unlinkable(why)
            if own is None:
                _check_alone(self._me.cache, descriptor)
            elif self._me.cache.rank not in {cache.rank for cache in ours}:
                raise PeerError(f"this engine's own directory has not published {name(self._me.cache)}", kind=K.MISUSE)
            mine = route([rank.cache for rank in descriptor.ranks], ours)[self._me.cache.rank]
            if len(mine.assignments) > MAX_READ:
                raise unlinkable(
                    f"this rank would have to read from {len(mine.assignments)} ranks of it; at most {MAX_READ} are allowed"
                )
            ranks = {rank.cache.rank: rank for rank in descriptor.ranks}
            targets = {rank: self._target(ranks[rank], source, each) for rank, each in sorted(mine.assignments.items())}
        except (PeerError, Incompatible, ValueError, LookupError) as e:
            return Failure.of(e, K.INCOMPATIBLE, f"engine {descriptor.engine[:100]!r} at {source}")
        routes = tuple(RankRoute(target.link, mine.readers[rank], rank) for rank, target in targets.items())
        return Path(tuple(targets.values()), Resolved(routes))

    def _target(self, rank: m.RankDescriptor, source: Source, assignments: tuple[ShardAssignment, ...]) -> Target:
        common = tuple(name for name in self._me.backends if name in rank.backends)
        if not common:
            theirs, ours = (" or ".join(map(repr, names)) for names in (rank.backends, self._me.backends))
            raise unlinkable(f"it uses back end {theirs}, this engine {ours}; configure the same on both")
        return Target(rank.address, rank.epoch, rank.cache, assignments, common, source)

    def tick(self, now: float) -> Iterator[tuple[Source, Failure]]:
        """Repeat unanswered questions, and yield failures for the sources whose directories now count as silent."""
        for directory in self._clock.due(now):
            q = self._queries.get(directory)
            if q is None:
                continue
            if q.silent is None and now - q.since >= self._patience:
                silent = Failure(K.PEER_UNREACHABLE, unanswered(self._patience, q.connected))
                if q.excuse is not None:
                    silent = Failure(q.excuse.kind, f"{q.excuse.detail}, for {self._patience:g} s")
                self._silence(q, silent)
                yield from self._failed(directory, silent)
            if directory not in self._queries:
                continue
            if q.silent is not None and now - q.wanted >= KEPT_S:
                self._close(directory)
                continue
            if q.connection is None or now - q.dialled >= min(REDIAL_S, self._patience / 3):
                self._redial(directory, q, now)
            else:
                q.connection.send(m.Lookup(m.PROTOCOL))
            again = now + PROBE_S if q.silent is not None else min(now + REPEAT_S, q.since + self._patience)
            self._clock.set(directory, again)

    def next_tick(self) -> float | None:
        return self._clock.next()

    def _failed(self, directory: Source, why: Failure) -> Iterator[tuple[Source, Failure]]:
        """Yield a failure for each source that depended on this directory."""
        for source in [s for s, own in self._wanted.items() if directory in (s, own)]:
            yield source, self._fail(source, why.about("", f"directory {directory}"))

    def _fail(self, source: Source, why: Failure) -> Failure:
        self._wanted.pop(source, None)
        return why

    def _close(self, directory: Source) -> None:
        self._clock.cancel(directory)
        connection = self._queries.pop(directory).connection
        if connection is not None:
            self._sockets.drop(connection)


def _check_alone(mine: Cache, descriptor: m.EngineDescriptor) -> None:
    """Refuse to read alone what several ranks should read: the producer would free its blocks after the first of them.

    Raises:
        PeerError: This cache lacks something that the producer has.
    """
    if any(view.held.count > 1 for view in mine.views):
        raise PeerError(
            "this rank has only some of the tokens; each fetch must name the engine's directory as 'own'", kind=K.MISUSE
        )
    held = {(view.plane, layer) for view in mine.views for layer in view.layers}
    for rank in descriptor.ranks:
        for view in rank.cache.views:
            layer = next((layer for layer in view.layers if (view.plane, layer) not in held), None)
            if layer is not None and not view.optional:
                raise PeerError(
                    f"this rank has no layer {layer[:100]!r}, plane {view.plane[:100]!r}; if another rank of this engine has, "
                    "each fetch must name the engine's directory as 'own'",
                    kind=K.MISUSE,
                )


def _excuse(frame: bytes) -> Failure | None:
    """Return why there is no descriptor yet; ``None`` if the answer is a descriptor, or a final refusal."""
    try:
        answer = m.decode(frame)
    except PeerError:
        return None
    if isinstance(answer, m.Refused) and answer.again:
        return Failure(answer.kind, f"it answers: {answer.reason}")
    return None


def _descriptor(frame: bytes, directory: Source) -> m.EngineDescriptor:
    """Return the descriptor that a directory answered with, once all that it describes has been checked.

    Raises:
        PeerError: The answer is a refusal, or cannot be used.
        ArgumentError: A cache is described wrongly.
    """
    descriptor = m.decode(frame)
    if isinstance(descriptor, m.Refused):
        raise PeerError(f"it refused: {descriptor.reason}", kind=descriptor.kind)
    if not isinstance(descriptor, m.EngineDescriptor):
        raise PeerError(f"it answered with a {type(descriptor).__name__}", kind=K.MISUSE)
    if descriptor.protocol != m.PROTOCOL:
        raise unlinkable(f"it speaks protocol {descriptor.protocol}, this side {m.PROTOCOL}; update one of them")
    if directory.epoch and descriptor.epoch != directory.epoch:
        raise PeerError("the engine there has restarted since it was named", kind=K.NO_SUCH_ENGINE)
    if len(descriptor.ranks) > m.MAX_RANKS:
        raise unlinkable(f"it describes {len(descriptor.ranks)} ranks; at most {m.MAX_RANKS} are allowed")
    until = time.thread_time() + CHECK_S
    for rank in descriptor.ranks:
        rank.cache.check()
        if time.thread_time() > until:
            raise unlinkable(f"its descriptor describes more than can be checked in {CHECK_S:g} s")
    return descriptor
