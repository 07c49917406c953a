"""One link: the streams that pass over it and the connection that carries our side of the talk.

The receiver rules the flow: it grants each stream a window and moves it on as bytes arrive, so that what lies in
queues is bounded whatever either side does. Streams are independent of each other; one that is stuck stops no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvxfer.errors import PeerError
from kvxfer.transport.contract import Completion, Fence, Verb
from kvxfer.transport.wakeup import Wakeup
from kvxfer_zmq.bytestream import FRAME, ByteStream
from kvxfer_zmq.options import Options
from kvxfer_zmq.wire import Endpoint, Header, Kind, routing_id

__all__ = ["Link", "Post"]

WINDOW = 8 * FRAME
"""Bytes that may be on their way for one stream."""

QUEUED_FRAMES = 8
"""Messages that ZeroMQ holds for a link on this side; so many can be cut off only together with the link."""

RETIRE_S = 1.0
"""How long an aborted SEND waits for ZeroMQ to let go of its memory before the link is cut to force it."""

RETRY_S = 0.0005
"""How often fences, and memory that ZeroMQ still holds, are looked at."""

EARLY_STREAMS = 4096
"""Streams that the peer may name before this side has posted them."""

# Plain numbers: arithmetic on zmq's flag types costs microseconds.
NOBLOCK, SNDMORE, POLLIN, POLLOUT = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN), int(zmq.POLLOUT)

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
)  # fmt: skip


@dataclass(eq=False)
class Post:
    """One half of a stream that has not ended.

    ``passed``: bytes handed to ZeroMQ (SEND) or written to memory (RECV). ``granted``: bytes that the receiver takes.
    ``frames``: trackers of views of our memory that ZeroMQ may still hold.
    """

    number: int
    verb: Verb
    stream: int
    data: ByteStream
    after: Fence | None
    passed: int = 0
    granted: int = -1
    frames: deque[zmq.MessageTracker] = field(default_factory=deque)

    def held(self) -> bool:
        while self.frames and self.frames[0].done:
            self.frames.popleft()
        return bool(self.frames)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking is what makes the socket's descriptor tell of the next one."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)


class Violation(Exception):
    """The peer said what no peer of ours would."""


class Link:
    """``done`` takes completions; ``say_bye`` gets a last word to the peer by another way than this link's own."""

    def __init__(
        self,
        number: int,
        mine: Endpoint,
        theirs: Endpoint,
        context: zmq.Context[zmq.Socket[bytes]],
        options: Options,
        wakeup: Wakeup,
        done: Callable[[Completion], None],
        say_bye: Callable[[Link, str], None],
    ) -> None:
        self.mine, self.theirs = mine, theirs
        self.due: float | None = None
        self.broken: str | None = None
        self._wakeup, self._done, self._say_bye = wakeup, done, say_bye
        self._ready = self._reached = False
        self._reach_by = time.monotonic() + options.connect_timeout_s
        self._sends: dict[int, Post] = {}
        self._recvs: dict[int, Post] = {}
        self._last = {Verb.SEND: -1, Verb.RECV: -1}
        self._fenced: list[Post] = []
        self._sendable: dict[int, Post] = {}
        self._early_grants: dict[int, tuple[int, int]] = {}
        self._early_ends: dict[tuple[Verb, int], str] = {}
        self._retiring: list[tuple[Post, str, float]] = []
        self._control: deque[tuple[Header, bytes]] = deque([(Header(Kind.HELLO), b"")])

        self._dealer = context.socket(zmq.DEALER)
        milliseconds = int(options.heartbeat_s * 1000)
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, QUEUED_FRAMES), (zmq.ROUTING_ID, routing_id(theirs.token, mine.token)),
            (zmq.RECONNECT_IVL, -1), (zmq.IPV6, "[" in theirs.address), (zmq.MAXMSGSIZE, 1 << 16),
            (zmq.CONNECT_TIMEOUT, int(options.connect_timeout_s * 1000)),
            (zmq.HANDSHAKE_IVL, int(options.connect_timeout_s * 1000)),
            (zmq.HEARTBEAT_IVL, milliseconds), (zmq.HEARTBEAT_TIMEOUT, 5 * milliseconds),
            (zmq.HEARTBEAT_TTL, 5 * milliseconds),
        ):  # fmt: skip
            self._dealer.setsockopt(option, value)
        self._monitor = self._dealer.get_monitor_socket(_EVENTS)
        for socket in (self._dealer, self._monitor):
            wakeup.add(socket.fileno(), number)
        try:
            self._dealer.connect(theirs.address)
        except zmq.ZMQError as e:
            self.cut(f"its address cannot be used: {e}", None)

    @property
    def peer(self) -> str:
        return f"{self.theirs.agent!r} at {self.theirs.address}"

    @property
    def busy(self) -> bool:
        """Whether anything has not ended yet."""
        return bool(self._sends or self._recvs or self._retiring)

    def uses(self, verb: Verb, stream: int) -> bool:
        """Whether the stream number was used before (they must rise)."""
        return stream <= self._last[verb]

    def post(self, post: Post) -> None:
        """Take over one half of a stream."""
        self._last[post.verb] = post.stream
        for stream in [s for s in self._early_grants if s < self._last[Verb.SEND] and s not in self._sends]:
            del self._early_grants[stream]
            self._say(Header(Kind.CANCEL, stream), b"the other side skipped this stream")
        self._early_ends = {k: v for k, v in self._early_ends.items() if k[1] >= self._last[k[0]]}
        (self._sends if post.verb is Verb.SEND else self._recvs)[post.stream] = post
        ended = self.broken or self._early_ends.pop((post.verb, post.stream), None)
        if ended:
            self._fail(post, ended)
        elif post.after is not None and not post.after.passed():
            self._fenced.append(post)
        else:
            self._start(post)

    def abort(self, number: int) -> bool:
        """End one half; returns whether it was one of this link's."""
        for posts in (self._sends, self._recvs):
            for post in posts.values():
                if post.number == number:
                    self._end_early(post, "aborted here", "the other side aborted it")
                    return True
        return any(post.number == number for post, _, _ in self._retiring)

    def advance(self, now: float, until: float) -> bool:
        """Do what can be done without waiting, sending no longer than ``until``. Returns whether to call again at
        once; else the descriptors and ``due`` tell when."""
        if not self.broken:
            self._watch(now)
        for post in [p for p in self._fenced if p.after is None or p.after.passed()]:
            self._fenced.remove(post)
            self._start(post)
        again = False
        if not self.broken:
            try:
                again = self._send_all(until)
            except Violation as e:
                self.violated(e)
        self._retire(now)
        self.due = now + RETRY_S if self._fenced or self._retiring else None
        if not self._reached and not self.broken:
            self.due = min(self.due or self._reach_by, self._reach_by)
        return again

    def take(self, header: Header, payload: memoryview) -> None:
        """Act on a message of the peer's."""
        if self.broken:
            return
        try:
            self._take(header, payload)
        except Violation as e:
            self.violated(e)

    def violated(self, what: Exception) -> None:
        """End the link because the peer said what no peer of ours would."""
        self.cut(f"it broke the protocol: {what}", f"this side broke the protocol: {what}")

    def cut(self, why: str, tell: str | None) -> None:
        """End the link: everything in flight fails, and ZeroMQ lets go of our memory. ``tell``: what the peer hears."""
        if self.broken:
            return
        self.broken = why
        if tell is not None:
            self._say_bye(self, tell)
        for socket in (self._dealer, self._monitor):
            self._wakeup.remove(socket.fileno())
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)
        for post in [*self._sends.values(), *self._recvs.values()]:
            self._fail(post, why)
        self._retire(time.monotonic())

    # What the peer says

    def _take(self, header: Header, payload: memoryview) -> None:
        kind, stream, a, b = header
        if kind is Kind.BYE:
            self.cut(_text(payload), None)
        elif kind in (Kind.HELLO, Kind.WELCOME):
            if kind is Kind.HELLO:
                self._say(Header(Kind.WELCOME))
            if not self._ready:
                self._ready = self._reached = True
                for waiting in [p for p in self._recvs.values() if p not in self._fenced]:
                    self._start(waiting)
        elif kind is Kind.GRANT:
            self._take_grant(stream, a, b)
        elif kind is Kind.DATA:
            self._take_data(stream, a, payload)
        elif kind is Kind.DONE:
            self._take_done(stream)
        else:
            verb = Verb.RECV if kind is Kind.CANCEL else Verb.SEND
            post = (self._recvs if verb is Verb.RECV else self._sends).get(stream)
            if post is not None:
                self._fail(post, _text(payload))
            elif stream > self._last[verb]:
                self._early_ends[verb, stream] = _text(payload)
                self._check_early()

    def _take_grant(self, stream: int, granted: int, nbytes: int) -> None:
        post = self._sends.get(stream)
        if post is None:
            if stream > self._last[Verb.SEND]:
                self._early_grants[stream] = granted, nbytes
                self._check_early()
            return
        if nbytes != post.data.nbytes:
            what = f"sizes differ: {post.data.nbytes} bytes to send, {nbytes} bytes expected"
            self._end_early(post, what, what)
            return
        if not post.granted <= granted <= nbytes:
            raise Violation(f"a grant of {granted} of {nbytes} bytes of stream {stream}")
        post.granted = granted
        if post not in self._fenced:
            self._sendable[stream] = post

    def _take_done(self, stream: int) -> None:
        post = self._sends.get(stream)
        if post is not None:
            if post.passed != post.data.nbytes:
                raise Violation(f"stream {stream} was called done after {post.passed} bytes")
            # The peer has every byte, so ZeroMQ will not look at the memory again.
            self._finish(post, None)

    def _take_data(self, stream: int, offset: int, payload: memoryview) -> None:
        post = self._recvs.get(stream)
        if post is None:
            if stream > self._last[Verb.RECV]:
                raise Violation(f"bytes of stream {stream}, which nobody has asked for")
            return  # what was on its way when the stream ended here
        end = offset + len(payload)
        if offset != post.passed or end > post.granted or (end == offset and post.data.nbytes):
            raise Violation(f"bytes {offset} to {end} of stream {stream}; expected {post.passed} to {post.granted}")
        if len(payload):
            post.data.write(offset, payload)
        post.passed = end
        if end == post.data.nbytes:
            self._say(Header(Kind.DONE, stream))
            self._finish(post, None)
        else:
            self._grant(post)

    def _check_early(self) -> None:
        if len(self._early_ends) + len(self._early_grants) > EARLY_STREAMS:
            raise Violation(f"more than {EARLY_STREAMS} streams that this side does not know")

    # What we say

    def _say(self, header: Header, payload: bytes = b"") -> None:
        self._control.append((header, payload))

    def _grant(self, post: Post) -> None:
        """Move the window on, in steps of half its size."""
        nbytes = post.data.nbytes
        if post.granted < nbytes and post.granted < post.passed + WINDOW // 2:
            post.granted = min(nbytes, post.passed + WINDOW)
            self._say(Header(Kind.GRANT, post.stream, post.granted, nbytes))

    def _start(self, post: Post) -> None:
        """The fence has passed; begin, as far as the peer is ready."""
        if post.verb is Verb.RECV:
            if self._ready:
                self._grant(post)
            return
        early = self._early_grants.pop(post.stream, None)
        if early is not None:
            self._take_grant(post.stream, *early)
        elif post.granted >= 0:
            self._sendable[post.stream] = post

    def _send_all(self, until: float) -> bool:
        """Control messages first, then frames as far as grants, ZeroMQ's queue and time allow."""
        while True:
            events = int(self._dealer.getsockopt(zmq.EVENTS))
            if events & POLLIN:
                self._hear()
                if self.broken:
                    return False
                continue
            if not events & POLLOUT:
                return False
            if self._control:
                self._send_control(*self._control.popleft())
            elif not self._send_frame():
                return False
            elif time.monotonic() > until:
                return True

    def _send_control(self, header: Header, payload: bytes) -> None:
        try:
            self._dealer.send_multipart([header.encode(), payload], NOBLOCK)
        except zmq.Again:
            pass  # the connection has just been lost; the monitor will say so

    def _send_frame(self) -> bool:
        """Send one frame of the first stream that may; returns whether there was one."""
        for stream, post in list(self._sendable.items()):
            nbytes = post.data.nbytes
            end = post.data.frame_end(post.passed) if post.passed < nbytes else nbytes
            # Grants move in steps larger than a frame, so one that is short of a whole frame will be moved.
            if end > post.granted:
                del self._sendable[stream]
                continue
            if end == nbytes:
                del self._sendable[stream]
            payload = post.data.read(post.passed, end) if nbytes else memoryview(b"")
            try:
                self._dealer.send(Header(Kind.DATA, stream, post.passed).encode(), NOBLOCK | SNDMORE)
                tracker = self._dealer.send(payload, NOBLOCK, copy=False, track=True)
            except zmq.Again:
                return False  # the connection has just been lost; the monitor will say so
            post.held()
            post.frames.append(tracker)
            post.passed = end
            return True
        return False

    # How streams and the link end

    def _end_early(self, post: Post, why: str, tell: str) -> None:
        self._say(Header(Kind.CANCEL if post.verb is Verb.SEND else Kind.REFUSE, post.stream), tell.encode())
        self._fail(post, why)

    def _fail(self, post: Post, why: str) -> None:
        if post.held():
            self._forget(post)
            self._retiring.append((post, why, time.monotonic() + RETIRE_S))
        else:
            self._finish(post, why)

    def _finish(self, post: Post, why: str | None) -> None:
        self._forget(post)
        error = None
        if why is not None:
            what = f"{post.verb} of {post.data.nbytes} bytes (stream {post.stream}) with {self.peer} failed"
            error = PeerError(f"{what} after {post.passed} bytes: {why}")
        self._done(Completion(post.number, error))

    def _forget(self, post: Post) -> None:
        if post.verb is Verb.SEND:
            self._sends.pop(post.stream, None)
            self._sendable.pop(post.stream, None)
        else:
            self._recvs.pop(post.stream, None)
        if post in self._fenced:
            self._fenced.remove(post)

    def _retire(self, now: float) -> None:
        """Finish failed SENDs whose memory ZeroMQ has let go of; force it to where that takes too long."""
        waiting, self._retiring = self._retiring, []
        overdue = False
        for post, why, until in waiting:
            if post.held():
                self._retiring.append((post, why, until))
                overdue |= now > until
            else:
                self._finish(post, why)
        if overdue:
            why = f"took nothing for {RETIRE_S} s after an abort, so the link was closed to free the memory"
            self.cut(f"it {why}", f"this side {why}")

    def _watch(self, now: float) -> None:
        """See what became of the connection."""
        while not self.broken and readable(self._monitor):
            event = recv_monitor_message(self._monitor, NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._reached = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._lose("the connection was lost (its process ended, or its host does not answer)")
            elif event == zmq.EVENT_CLOSED:
                self._lose("it cannot be reached (nobody listens there)")
            else:
                self._lose("it cannot be reached (what listens there gave no fitting answer)")
        if not self._reached and now > self._reach_by:
            self._lose("it cannot be reached (no answer in time)")

    def _lose(self, why: str) -> None:
        self.cut(why, "the other side cannot reach this one (any more)")

    def _hear(self) -> None:
        """The peer's ROUTER answers only to say that the link is over."""
        raw = self._dealer.recv_multipart(NOBLOCK)
        reason = raw[1][:200] if len(raw) == 2 else b"the link is over"
        self.cut(_text(memoryview(reason)), None)


def _text(raw: memoryview) -> str:
    """A reason from the peer, fit for a message and a log."""
    text = bytes(raw[:200]).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text) or "the peer gave no reason"
