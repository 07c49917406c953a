"""The engine's directory: one address, served by the scheduler side, that leads to all of the engine's ranks.

Scheduler sides also use it to tell each other about transfers that no worker knows yet: keep their lease (``Renew``), free
them (``Decline``), say when you have begun with them (``Await``, answered by ``Begun`` or ``OtherContent``), offer what you hold of a
prompt (``Inquire``, answered by ``InquiryAnswer``).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec

from kvxfer import arguments, clock
from kvxfer import facts as f
from kvxfer.config import Config
from kvxfer.control import sockets
from kvxfer.control.endings import ProcessGuard, close_at_exit
from kvxfer.control.explaining import Explainer
from kvxfer.control.inquiries import Inquiries, PeerInquiry
from kvxfer.control.notices import Answered, Notice, NoticeBox, Said, bundles
from kvxfer.control.stories import explain_locally
from kvxfer.errors import ArgumentError, ClosedError, KvxferError, PeerError
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId, new_epoch
from kvxfer.logs import logger
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.shares import Debts, IndexedExpiringMap
from kvxfer.protocol.timers import Timers
from kvxfer.security import RateLimitedWarnings, Security
from kvxfer.text import printable
from kvxfer.threads import NamedThread

__all__ = ["ANY_EPOCH", "Directory"]

log = logger("kvxfer.directory")

ANY_EPOCH = 0
"""The epoch of a source that a router named without knowing the engine's. Only the transfer's id and digest can then tell the
engine from one that had the same address before."""
IDLE_S = 600.0
"""Seconds after which an unused connection to another directory is closed."""
SLICE_S = 0.005
"""Seconds of a turn that may be spent on incoming messages, and on outgoing ones."""
MESSAGES_A_TURN = 16
"""The most messages of one connection before others have their turn."""
BEYOND_PER_S = 8 << 20
"""The most bytes a second of notices beyond its share (``NoticeBox``) that are looked at for a peer, over all of its connections."""
MAX_TOLD = 100_000
"""The most notices that wait to be sent."""
MAX_AWAITED = 100_000
"""The most transfers whose beginning other engines wait for here."""
_NOT_UNDERSTOOD = m.Refused(FailureKind.INCOMPATIBLE, f"not understood by kvxfer protocol {m.PROTOCOL}", False)
_UNPUBLISHED = m.encode(m.Refused(FailureKind.NOT_PUBLISHED, "its ranks are not published yet", again=True))

N = TypeVar("N", bound=m.Renew | m.Decline | m.Await)


class Directory:
    """Serves the descriptor of an engine, on a thread of its own.

    Any thread may call any method; only ``close`` blocks. In a process forked from the
    one that made it, they fail with ``KvxferError``, except ``close``, which does nothing there. The directory is closed when
    a ``with`` block or the interpreter ends.

    Args:
        config: The settings, the same as for the engine's agents. ``listen``, ``port`` and ``advertise`` say where
            it is served, ``key_file`` and ``peers`` who may talk to it.
        engine: The engine's name, for peers and logs.
        facts: What all KV of the engine depends on; see ``identify``.
        epoch: The engine's epoch; ``None`` draws a new one.

    Attributes:
        source: Where other engines find this one.
        explain: Answers what operators ask about requests (``kvxfer why``). Called on the directory's thread; may be set at any time. By
            default it tells of the transfers of those of its ranks' agents that are in this process.
        begun: A function of a transfer and a digest that returns whether the engine has begun with that transfer, or is done
            with it. Called on the directory's thread; may be set at any time. By default it returns True.
        differs: A function of the same that returns whether the engine has begun with other content under that name.
        inquiries: What other engines want to know, for this engine to ``answer``. None: they are told that nothing is held.
        wake: Called when there is an inquiry, an answer to one, or a directory that cannot be reached. Called on the directory's thread;
            may be set at any time, and must not block.

    Raises:
        ArgumentError: An argument has the wrong type or range.
        ConfigError: The key cannot be read, or an entry of ``peers`` or the facts are invalid.
        OSError: The address is not available.
    """

    def __init__(
        self, config: Config, engine: str = "", facts: Mapping[str, str] | None = None, *, epoch: int | None = None
    ) -> None:
        config = arguments.instance("config", config, Config).located()
        self.engine = arguments.string("engine", engine, empty=True)
        self.epoch = new_epoch() if epoch is None else arguments.integer("epoch", epoch, 1)
        self._owner = ProcessGuard("this directory")
        self._facts: Mapping[str, str] = f.check(facts or {})
        self._ranks: tuple[m.RankDescriptor, ...] = ()
        self._descriptor = b""  # as it is sent
        # What is to be told to an engine, and of what is to be told to all that wait for it that it has begun.
        self._outbox: deque[
            tuple[Source, m.Renew | m.Decline | m.Await | m.Inquire] | m.Named | tuple[PeerInquiry, m.InquiryAnswer]
        ] = deque(maxlen=MAX_TOLD)
        self.begun: Callable[[TransferId, bytes], bool] = lambda transfer, digest: True
        self.differs: Callable[[TransferId, bytes], bool] = lambda transfer, digest: False
        # Neither this nor the thread may hold on to the directory, or it would never be known to be dropped.
        me = weakref.ref(self)
        self.explain: Callable[[m.Explain], m.Explained] = partial(_explain, me)
        self._explainer = Explainer()
        self.inquiries: Inquiries | None = None
        self.wake: Callable[[], None] = lambda: None
        self._awaited = IndexedExpiringMap[sockets.ControlConnection, bytes, bytes](config.lease, MAX_AWAITED)
        self._notices = NoticeBox()
        self._paused: dict[sockets.ControlConnection, float] = {}  # until when nothing is received from it
        self._beyond: Debts[PeerIdentity] = Debts()  # what these owe
        self._peers: dict[Source, sockets.ControlConnection] = {}  # the one that was told something last is the last
        self._idle: Timers[Source] = Timers()
        self._complain = RateLimitedWarnings(log)
        self._closing = False
        self._sockets = sockets.ControlSockets(Security.of(config), self._outbox, config.peer_timeout)
        try:
            told = config.told
            self.source = Source(told, self._sockets.listen(config.listen, config.port), self.epoch)
            self._thread = NamedThread(target=_run, name="kvxfer-dir", args=(me, self._sockets))
            self._thread.start()
        except BaseException:
            self._sockets.close()
            raise
        close_at_exit(self)

    def __del__(self) -> None:
        """Warn if it was dropped while open; its thread ends within a second."""
        thread = getattr(self, "_thread", None)  # there is none if it could not be made
        if thread is not None and not self._closing and self._owner.same_process:
            self._closing = True
            warnings.warn("a directory was dropped without being closed", ResourceWarning, stacklevel=1)

    def __reduce__(self) -> str:
        raise KvxferError(
            "a directory belongs to the process that made it, and cannot be copied or pickled: its 'source' can"
        )

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self, ranks: tuple[m.RankDescriptor, ...]) -> None:
        """Set the engine's ranks. Until then, peers that look the engine up are told to ask again.

        Args:
            ranks: The ``descriptor`` of each agent.

        Raises:
            ArgumentError: One is not a descriptor, two are of the same rank, or they are more than 1,024.
            ClosedError: The directory has been closed.
            PeerError: They are too many for one message.
        """
        self._check_open("publish")
        ranks = arguments.sequence_of("ranks", ranks, m.RankDescriptor)
        if len(ranks) > m.MAX_RANKS:
            raise ArgumentError(f"ranks must be at most {m.MAX_RANKS}, not {len(ranks)}")
        places = [rank.cache.rank for rank in ranks]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice is not None:
            raise ArgumentError(f"ranks must be one of each rank, and rank pp{twice.pp}/tp{twice.tp} is there twice")
        self._state(ranks, self._facts)

    def identify(self, facts: Mapping[str, str]) -> None:
        """Set what all KV of the engine depends on (``kvxfer.facts``).

        Other engines' agents compare it with their own before they make links to this engine. It may change while the engine
        lives, if its weights do.

        Raises:
            ClosedError: The directory has been closed.
            ConfigError: The facts are too many or too long.
        """
        self._check_open("identify")
        self._state(self._ranks, f.check(facts))

    def _state(self, ranks: tuple[m.RankDescriptor, ...], facts: Mapping[str, str]) -> None:
        descriptor = m.EngineDescriptor(m.PROTOCOL, self.engine, self.epoch, ranks, dict(facts))
        self._ranks, self._facts, self._descriptor = ranks, facts, m.encode(descriptor) if ranks else b""

    def _check_open(self, call: str) -> None:
        self._owner.check()
        if self._closing:
            raise ClosedError(f"this directory has been closed: call {call!r} before that, or make a new one")

    def notices(self) -> list[Notice]:
        """Return the notices of other engines since the last call."""
        self._owner.check()
        return self._notices.take()

    def begins(self, transfer: TransferId, digest: bytes) -> None:
        """Tell the engines that wait for a transfer of this name that this one has begun with it; ``begun`` must already return True."""
        named = m.Named(transfer, digest)
        if self._awaited:  # a peer that comes to wait after this look is told at once (``_await``)
            self._outbox.append(named)
            self._sockets.wake()

    def tell(self, source: Source, message: m.Renew | m.Decline | m.Await) -> None:
        """Send a notice to another engine's directory. It may get lost: repeat it, or rely on the lease.

        Raises:
            ArgumentError: An argument has the wrong type.
        """
        self._owner.check()
        arguments.instance("source", source, Source)
        if not isinstance(message, m.Renew | m.Decline | m.Await):
            raise ArgumentError(f"message must be a notice, not {arguments.describe(message)}")
        for named in bundles(message.transfers):
            self._outbox.append((source, msgspec.structs.replace(message, transfers=named)))
        self._sockets.wake()

    def inquire(self, source: Source, message: m.Inquire) -> None:
        """Ask another engine what it holds of a prompt. ``notices`` has its ``Answered``, or an ``Unheard``, or neither if it is silent."""
        self._outbox.append((source, message))
        self._sockets.wake()

    def answer(self, inquiry: PeerInquiry, holding: m.InquiryAnswer) -> None:
        """Answer one of ``inquiries``."""
        self._outbox.append((inquiry, holding))
        self._sockets.wake()

    @property
    def noticed(self) -> bool:
        """Whether ``notices`` has an answer, or an engine waits in ``inquiries``. Any thread."""
        return bool(self._notices.answered or self.inquiries)

    def close(self, timeout: float = 2.0) -> None:
        """Stop serving, and wait for that for up to ``timeout`` seconds. May be called any number of times."""
        timeout = arguments.seconds("timeout", timeout)
        self.begin_close()
        if self._owner.same_process and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def begin_close(self) -> None:
        """Begin to stop, and return at once."""
        if self._owner.same_process:
            self._closing = True
            self._sockets.wake()

    def _turn(self) -> None:
        due = min([*self._paused.values(), *([] if (idle := self._idle.next()) is None else [idle])], default=None)
        self._sockets.poll(1.0 if due is None else min(max(due - clock.now(), 0.0), 1.0))
        now = clock.now()
        for key in self._idle.due(now):
            self._sockets.drop(self._peers.pop(key))
        self._awaited.forget(now)
        for paused in [one for one, until in self._paused.items() if until <= now or one.lost is not None]:
            del self._paused[paused]
            self._sockets.go_on(paused)
        until = now + SLICE_S
        while self._outbox and clock.now() < until:
            match self._outbox.popleft():
                case m.Named() as named:
                    for connection in self._awaited.owners(named.transfer.brief):
                        self._say_begun(connection, named.transfer, named.digest)
                case PeerInquiry() as inquiry, message:
                    inquiry.connection.send(message)
                case Source() as source, message:
                    self._deliver(source, message)
        until = clock.now() + SLICE_S
        for connection in self._sockets.ready():
            self._hear(connection, until)
            if clock.now() >= until:
                break
        self._sockets.flush()

    def _hear(self, connection: sockets.ControlConnection, until: float) -> None:
        handle = self._answer if connection.destination is None else self._take
        for _ in range(MESSAGES_A_TURN):
            if (frame := connection.receive()) is None:
                break
            handle(connection, frame)
            if clock.now() >= until:
                break
        if connection.lost is None or connection.ready:
            return
        key = connection.destination
        self._sockets.drop(connection)  # and what it has sent that nobody will handle
        if not isinstance(key, Source):
            self._notices.leave(connection)
            if self.inquiries is not None:
                self.inquiries.hung_up = True
            self._awaited.leave(connection)
        elif self._peers.get(key) is connection:
            del self._peers[key]
            self._idle.cancel(key)
            self._unheard(key, connection.lost)

    def _answer(self, connection: sockets.ControlConnection, frame: bytes) -> None:
        match msg := self._decoded(connection, frame):
            case None:
                connection.send(_NOT_UNDERSTOOD)
                self._sockets.finish(connection)
            case m.Lookup():
                connection.send_frame(self._descriptor or _UNPUBLISHED)
            case m.Explain():
                connection.send(self._explainer.answer(msg, connection, self.explain))
            case m.Renew() | m.Decline() if msg.epoch in (self.epoch, ANY_EPOCH):
                self._notice(self._placed(msg), connection, len(frame))
            case m.Await() if msg.epoch in (self.epoch, ANY_EPOCH):
                for named in self._placed(msg).transfers:
                    self._await(connection, named)
            case m.Inquire():
                self._inquire(connection, msg)
            case _:
                pass  # for an engine that was here before, or not for a directory

    def _decoded(self, connection: sockets.ControlConnection, frame: bytes) -> m.Message | None:
        try:
            return m.decode(frame)
        except PeerError as e:
            self._complain("directory: ignored a message from %s: %s", connection.host, e)
            return None

    def _placed(self, notice: N) -> N:
        """Return a notice with this engine's own names for transfers of which a consumer does not know the epoch."""
        if notice.epoch != ANY_EPOCH:
            return notice
        named = tuple(m.Named(one.transfer.of(self.epoch), one.digest) for one in notice.transfers)
        return msgspec.structs.replace(notice, transfers=named)

    def _take(self, connection: sockets.ControlConnection, frame: bytes) -> None:
        """Handle the answer of a directory that was told something; what is none is dropped."""
        msg = self._decoded(connection, frame)
        if isinstance(msg, m.InquiryAnswer) and isinstance(to := connection.destination, Source):
            self._notice(Answered(to.host, to.port, msg), connection, len(frame))
            self.wake()
        elif isinstance(msg, m.Begun | m.OtherContent):
            self._notice(msg, connection, len(frame))

    def _inquire(self, connection: sockets.ControlConnection, msg: m.Inquire) -> None:
        """Have the engine answer an inquiry, or answer that nothing is held if it cannot be asked."""
        reason = ""
        if msg.epoch not in (self.epoch, ANY_EPOCH):
            reason = "another engine was here before"
        elif not msg.transfer.is_asked:
            reason = "it names no question"  # but, it may be, what another engine is to fetch
        elif self.inquiries is not None:
            if self.inquiries.put(PeerInquiry(msg, connection)):
                self.wake()
                return
            reason = "it has more inquiries than it can answer"
        connection.send(m.InquiryAnswer(msg.transfer, self.epoch, reason=reason))

    def _unheard(self, peer: Source, why: object) -> None:
        self._complain("directory: notices for %s may be lost: %s", peer, why)
        self._notices.unheard(peer.host, peer.port)
        self.wake()

    def _await(self, connection: sockets.ControlConnection, named: m.Named) -> None:
        """Have a peer told when the engine has begun; record it before checking, so that no beginning falls in between."""
        self._awaited.put(connection, named.transfer.brief, named.digest, clock.now(), connection.peer)
        begun = self.begun(named.transfer, named.digest)
        if begun or self.differs(named.transfer, named.digest):
            self._say_begun(connection, named.transfer, named.digest if begun else None)

    def _say_begun(self, connection: sockets.ControlConnection, transfer: TransferId, digest: bytes | None) -> None:
        """Tell a peer that waits for a transfer whether what has begun under this name is what it waits for."""
        if (awaited := self._awaited.get(connection, transfer.brief)) is not None:
            self._awaited.pop(connection, transfer.brief)
            named = (m.Named(transfer, awaited),)  # the offer stays: whom its digest is unknown to cannot end it
            connection.send(m.Begun(named) if awaited == digest else m.OtherContent(named))
            if awaited != digest:
                what = "directory: an engine on %s has waited for %s and computes it: other content is offered here under that name"
                self._complain(what, connection.host, printable(transfer))

    def _notice(self, notice: Said, connection: sockets.ControlConnection, nbytes: int) -> None:
        lost = self._notices.put(notice, connection, nbytes)
        if lost is None:
            self._complain("directory: %s sends more notices than the engine can take; one is dropped", connection.host)
            now = clock.now()
            connection.waits = True
            self._paused[connection] = now + self._beyond.add(connection.peer, nbytes / BEYOND_PER_S, now)
        for _ in range(lost or 0):
            self._complain("directory: a peer sends more notices than the engine can take; one is dropped")

    def _deliver(self, source: Source, message: m.Message) -> None:
        key = Source(source.host, source.port, ANY_EPOCH)  # one connection for each address: a notice names its epoch
        connection = self._peers.get(key)
        try:
            if connection is None:
                self._make_room()
                connection = self._peers[key] = self._sockets.dial(
                    sockets.address(key.host, key.port), key, sockets.GUEST_FRAME
                )
        except PeerError as e:
            self._unheard(key, e)
            return
        self._peers[key] = self._peers.pop(key)
        self._idle.set(key, clock.now() + IDLE_S)
        if not connection.send(message):
            self._complain("directory: %s does not read the notices sent to it", source)

    def _make_room(self) -> None:
        """Hang up on the directory that was told something longest ago, if there are too many; it is dialled again when it is needed."""
        if len(self._peers) >= self._sockets.policy.unheard:
            key = next(iter(self._peers))
            self._idle.cancel(key)
            self._sockets.drop(self._peers.pop(key))


def _run(directory: weakref.ref[Directory], its: sockets.ControlSockets) -> None:
    """Serve until the directory is closed, or dropped."""
    try:
        while (served := directory()) is not None and not served._closing:
            try:
                served._turn()
            except BaseException:
                log.exception("directory: a message could not be handled and is dropped")
            del served
    finally:
        its.close()


def _explain(directory: weakref.ref[Directory], asked: m.Explain) -> m.Explained:
    """Tell of the transfers of those of its ranks' agents that are in this process."""
    served = directory()
    ranks = () if served is None else served._ranks
    return explain_locally("" if served is None else served.engine, [rank.epoch for rank in ranks], asked)
