"""One link: the streams that pass over it.

The receiver rules the flow: it grants each stream a window and moves it on as bytes arrive, so that what lies in
queues is bounded whatever either side does. Streams are independent of each other; one that is stuck stops no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvxfer import clock
from kvxfer.backend import LinkBase, Submitted
from kvxfer.errors import KvxferError, PeerError
from kvxfer.transport.contract import Completion, Verb
from kvxfer_zmq.bytestream import FRAME, ByteStream
from kvxfer_zmq.connection import Connection
from kvxfer_zmq.endpoint import Endpoint
from kvxfer_zmq.wire import Header, Kind

WINDOW = 8 * FRAME
"""Bytes that may be on their way for one stream."""

RETIRE_S = 1.0
"""How long an aborted SEND waits for ZeroMQ to let go of its memory before the link is cut to force it."""

EARLY_STREAMS = 4096
"""Streams that the peer may name before this side has posted them."""

UNSENT = 4096
"""Answers that may wait for the peer to read those before them."""


@dataclass(eq=False)
class Half(Submitted):
    """One half of a stream.

    ``passed``: bytes handed to ZeroMQ (SEND) or written to memory (RECV). ``granted``: bytes that the receiver takes.
    ``frames``: trackers of views of our memory that ZeroMQ may still hold.
    """

    verb: Verb
    stream: int
    data: ByteStream
    passed: int = 0
    granted: int = -1
    frames: deque[zmq.MessageTracker] = field(default_factory=deque)

    def held(self) -> bool:
        while self.frames and self.frames[0].done:
            self.frames.popleft()
        return bool(self.frames)


class Violation(Exception):
    """The peer said what no peer of ours would."""


class Link(LinkBase[Half]):
    """``say_bye`` gets a last word to the peer by another way than this link's own."""

    def __init__(
        self,
        number: int,
        mine: Endpoint,
        theirs: Endpoint,
        connection: Connection,
        within_s: float,
        done: Callable[[Completion], None],
        say_bye: Callable[[Link, str], None],
    ) -> None:
        super().__init__(done, within_s)
        self.number, self.mine, self.theirs = number, mine, theirs
        self._say_bye = say_bye
        self._heard = False
        self._sends: dict[int, Half] = {}
        self._recvs: dict[int, Half] = {}
        self._last = {Verb.SEND: -1, Verb.RECV: -1}
        self._sendable: dict[int, Half] = {}
        self._early_grants: dict[int, tuple[int, int]] = {}
        self._early_ends: dict[tuple[Verb, int], str] = {}
        self._retiring: dict[Half, tuple[KvxferError, float]] = {}
        self._control: deque[tuple[Header, bytes]] = deque([(Header(Kind.HELLO), b"")])
        self._answers: deque[tuple[Header, bytes]] = deque()  # apart, because the peer decides how many they are
        self._connection = connection

    @property
    def talks(self) -> bool:
        """Whether there is something to send."""
        return bool(self._control or self._answers or self._sendable)

    @property
    def retires(self) -> bool:
        """Whether ZeroMQ still holds memory of batches that have failed, of which no descriptor tells."""
        return bool(self._retiring)

    @property
    def peer(self) -> str:
        return f"{self.theirs.agent!r} at {self.theirs.address}"

    def failed(self, half: Half, why: Exception) -> str:
        what = f"{half.verb} of {half.data.nbytes} bytes (stream {half.stream}) with {self.peer} failed"
        return f"{what} after {half.passed} bytes: {why}"

    def submit(self, half: Half) -> None:
        """Take over one half of a stream. From now on the peer may speak of it, whether or not it has begun here."""
        verb, stream = half.verb, half.stream
        self._last[verb] = stream
        if verb is Verb.SEND:
            for skipped in [s for s in self._early_grants if s < stream]:
                del self._early_grants[skipped]
                self._say(Header(Kind.CANCEL, skipped), b"the other side skipped this stream")
        self._early_ends = {k: why for k, why in self._early_ends.items() if k[1] >= self._last[k[0]]}
        ended = self._early_ends.pop((verb, stream), None)
        grant = self._early_grants.pop(stream, None) if verb is Verb.SEND else None
        (self._sends if verb is Verb.SEND else self._recvs)[stream] = half
        super().submit(half)
        if self.broken is not None:
            self._forget(half)
        elif ended:
            self._fail(half, PeerError(ended))
        elif grant is not None:
            try:
                self._take_grant(stream, *grant)
            except Violation as e:
                self.violated(e)

    def greet(self) -> bool:
        if self._connection.reached:
            self.reached()
        return self._heard

    def post(self, half: Half) -> None:
        if half.verb is Verb.RECV:
            self._grant(half)
        elif half.granted >= 0:
            self._sendable[half.stream] = half

    def abort(self, number: int) -> None:
        """End one half early. One that is only waiting for ZeroMQ to let go of its memory goes on to wait."""
        half = self.flights[number]
        if half not in self._retiring:
            self._end_early(half, "aborted here", "the other side aborted it")

    def advance(self, now: float, until: float) -> bool:
        """Do what can be done without waiting, sending no longer than ``until``.

        Returns whether to call again at once.
        """
        if self.broken is None:
            self._connection.watch()
            if self._connection.lost:
                self.lose(self._connection.lost, "the other side cannot reach this one (any more)")
        again = self.broken is None and self._send_all(until)
        self._retire(now)
        return again

    def take(self, header: Header, payload: memoryview) -> None:
        """Act on a message of the peer's."""
        if self.broken is not None:
            return
        try:
            self._take(header, payload)
        except Violation as e:
            self.violated(e)

    def violated(self, what: Exception) -> None:
        """End the link because the peer said what no peer of ours would."""
        self.lose(f"it broke the protocol: {what}", f"this side broke the protocol: {what}")

    def bye(self, cause: KvxferError, says: str | None) -> None:
        if says is not None:
            self._say_bye(self, says)
        self._connection.close()
        for half in [*self._sends.values(), *self._recvs.values()]:
            self._fail(half, cause)
        self._retire(clock.now())

    # What the peer says

    def _take(self, header: Header, payload: memoryview) -> None:
        kind, stream, a, b = header
        if kind is Kind.BYE:
            self.lose(_text(payload))
        elif kind in (Kind.HELLO, Kind.WELCOME):
            if kind is Kind.HELLO:
                self._answer(Header(Kind.WELCOME))
            self._heard = True
        elif kind is Kind.GRANT:
            self._take_grant(stream, a, b)
        elif kind is Kind.DATA:
            self._take_data(stream, a, payload)
        elif kind is Kind.DONE:
            self._take_done(stream)
        else:
            verb = Verb.RECV if kind is Kind.CANCEL else Verb.SEND
            half = (self._recvs if verb is Verb.RECV else self._sends).get(stream)
            if half is not None:
                self._fail(half, PeerError(_text(payload)))
            elif stream > self._last[verb]:
                self._early_ends[verb, stream] = _text(payload)
                self._check_early()

    def _take_grant(self, stream: int, granted: int, nbytes: int) -> None:
        half = self._sends.get(stream)
        if half is None:
            if stream > self._last[Verb.SEND]:
                self._early_grants[stream] = granted, nbytes
                self._check_early()
            else:
                self._answer(Header(Kind.CANCEL, stream), b"the other side skipped this stream, or has ended it")
            return
        if nbytes != half.data.nbytes:
            what = f"sizes differ: {half.data.nbytes} bytes to send, {nbytes} bytes expected"
            self._end_early(half, what, what)
            return
        if not half.granted <= granted <= nbytes:
            raise Violation(f"a grant of {granted} of {nbytes} bytes of stream {stream}")
        half.granted = granted
        if half.number not in self.waiting:
            self._sendable[stream] = half

    def _take_done(self, stream: int) -> None:
        half = self._sends.get(stream)
        if half is not None:
            if half.passed != half.data.nbytes:
                raise Violation(f"stream {stream} was called done after {half.passed} bytes")
            # The peer has every byte, so ZeroMQ will not look at the memory again.
            self._finish(half)

    def _take_data(self, stream: int, offset: int, payload: memoryview) -> None:
        half = self._recvs.get(stream)
        if half is None:
            if stream > self._last[Verb.RECV]:
                raise Violation(f"bytes of stream {stream}, which nobody has asked for")
            return  # what was on its way when the stream ended here
        end = offset + len(payload)
        if offset != half.passed or end > half.granted or (end == offset and half.data.nbytes):
            raise Violation(f"bytes {offset} to {end} of stream {stream}; expected {half.passed} to {half.granted}")
        if len(payload):
            half.data.write(offset, payload)
        half.passed = end
        if end == half.data.nbytes:
            self._say(Header(Kind.DONE, stream))
            self._finish(half)
        else:
            self._grant(half)

    def _check_early(self) -> None:
        if len(self._early_ends) + len(self._early_grants) > EARLY_STREAMS:
            raise Violation(f"more than {EARLY_STREAMS} streams that this side does not know")

    # What we say

    def _say(self, header: Header, payload: bytes = b"") -> None:
        self._control.append((header, payload))

    def _answer(self, header: Header, payload: bytes = b"") -> None:
        if len(self._answers) >= UNSENT:
            raise Violation(f"more than {UNSENT} messages whose answers it does not read")
        self._answers.append((header, payload))

    def _may_say(self) -> bool:
        """Whether there is a message that the peer will hear: before its ``connect`` it drops what comes, and answers HELLO once called."""
        return bool(self._control) and (self._heard or self._control[0][0].kind is Kind.HELLO)

    def _grant(self, half: Half) -> None:
        """Move the window on, in steps of half its size."""
        nbytes = half.data.nbytes
        if half.granted < nbytes and half.granted < half.passed + WINDOW // 2:
            half.granted = min(nbytes, half.passed + WINDOW)
            self._say(Header(Kind.GRANT, half.stream, half.granted, nbytes))

    def _send_all(self, until: float) -> bool:
        """Control messages first, then frames as far as grants, ZeroMQ's queue and time allow."""
        while True:
            heard, room = self._connection.poll()
            if heard:
                self.lose(_text(memoryview(self._connection.hear())))
                return False
            if not room:
                return False
            if self._answers:
                self._connection.say(*self._answers.popleft())
            elif self._may_say():
                self._connection.say(*self._control.popleft())
            elif not self._send_frame():
                return False
            elif clock.now() > until:
                return True

    def _send_frame(self) -> bool:
        """Send one frame of the first stream that may; returns whether there was one."""
        while self._sendable:
            stream, half = next(iter(self._sendable.items()))
            nbytes = half.data.nbytes
            end = half.data.frame_end(half.passed) if half.passed < nbytes else nbytes
            # Grants move in steps larger than a frame, so one that is short of a whole frame will be moved.
            if end > half.granted:
                del self._sendable[stream]
                continue
            if end == nbytes:
                del self._sendable[stream]
            payload = half.data.read(half.passed, end) if nbytes else memoryview(b"")
            tracker = self._connection.lend(Header(Kind.DATA, stream, half.passed), payload)
            if tracker is None:
                return False
            half.held()
            half.frames.append(tracker)
            half.passed = end
            return True
        return False

    # How streams and the link end

    def _end_early(self, half: Half, why: str, tell: str) -> None:
        self._say(Header(Kind.CANCEL if half.verb is Verb.SEND else Kind.REFUSE, half.stream), tell.encode())
        self._fail(half, PeerError(why))

    def _fail(self, half: Half, cause: KvxferError) -> None:
        self._forget(half)
        if half.held():
            self._retiring[half] = cause, clock.now() + RETIRE_S
        else:
            self.end(half, cause)

    def _finish(self, half: Half) -> None:
        self._forget(half)
        self.end(half)

    def _forget(self, half: Half) -> None:
        if half.verb is Verb.SEND:
            self._sends.pop(half.stream, None)
            self._sendable.pop(half.stream, None)
        else:
            self._recvs.pop(half.stream, None)

    def _retire(self, now: float) -> None:
        """Finish failed SENDs whose memory ZeroMQ has let go of; force it to where that takes too long."""
        for half, (cause, _) in list(self._retiring.items()):
            if not half.held():
                del self._retiring[half]
                self.end(half, cause)
        if any(now > until for _, until in self._retiring.values()):
            why = f"took nothing for {RETIRE_S} s after an abort, so the link was closed to free the memory"
            self.lose(f"it {why}", f"this side {why}")


def _text(raw: memoryview) -> str:
    """Return a reason from the peer."""
    return bytes(raw[:200]).decode("utf-8", "replace") or "the peer gave no reason"
