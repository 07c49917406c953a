"""One link: the streams that pass over it.

The receiver rules the flow: it grants each stream a window and moves it on as bytes arrive, so that what lies in
queues is bounded whatever either side does. Streams are independent of each other; one that is stuck stops no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvxfer.errors import PeerError
from kvxfer.transport.contract import Completion, Fence, Verb
from kvxfer_zmq.bytestream import FRAME, ByteStream
from kvxfer_zmq.connection import Connection
from kvxfer_zmq.endpoint import Endpoint
from kvxfer_zmq.wire import Header, Kind

WINDOW = 8 * FRAME
"""Bytes that may be on their way for one stream."""

RETIRE_S = 1.0
"""How long an aborted SEND waits for ZeroMQ to let go of its memory before the link is cut to force it."""

RETRY_S = 0.0005
"""How often fences, and memory that ZeroMQ still holds, are looked at."""

EARLY_STREAMS = 4096
"""Streams that the peer may name before this side has posted them."""


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


class Violation(Exception):
    """The peer said what no peer of ours would."""


class Link:
    """``done`` takes completions; ``say_bye`` gets a last word to the peer by another way than this link's own."""

    def __init__(
        self,
        number: int,
        mine: Endpoint,
        theirs: Endpoint,
        connection: Connection,
        done: Callable[[Completion], None],
        say_bye: Callable[[Link, str], None],
    ) -> None:
        self.number, self.mine, self.theirs = number, mine, theirs
        self.due: float | None = None
        self.broken: PeerError | None = None
        self._done, self._say_bye = done, say_bye
        self._ready = False
        self._sends: dict[int, Post] = {}
        self._recvs: dict[int, Post] = {}
        self._last = {Verb.SEND: -1, Verb.RECV: -1}
        self._fenced: list[Post] = []
        self._sendable: dict[int, Post] = {}
        self._early_grants: dict[int, tuple[int, int]] = {}
        self._early_ends: dict[tuple[Verb, int], str] = {}
        self._retiring: list[tuple[Post, str, float]] = []
        self._control: deque[tuple[Header, bytes]] = deque([(Header(Kind.HELLO), b"")])
        self._connection = connection

    @property
    def peer(self) -> str:
        return f"{self.theirs.agent!r} at {self.theirs.address}"

    @property
    def busy(self) -> bool:
        """Whether anything has not ended yet."""
        return bool(self._sends or self._recvs or self._retiring)

    def post(self, post: Post) -> None:
        """Take over one half of a stream."""
        verb, stream = post.verb, post.stream
        self._last[verb] = stream
        (self._sends if verb is Verb.SEND else self._recvs)[stream] = post
        if post.after is not None:
            self._fenced.append(post)
        if verb is Verb.SEND:
            for skipped in [s for s in self._early_grants if s < stream]:
                del self._early_grants[skipped]
                self._say(Header(Kind.CANCEL, skipped), b"the other side skipped this stream")
        self._early_ends = {k: why for k, why in self._early_ends.items() if k[1] >= self._last[k[0]]}
        ended = self._early_ends.pop((verb, stream), None) if self.broken is None else str(self.broken)
        if ended:
            self._fail(post, ended)
        elif verb is Verb.SEND and stream in self._early_grants:
            try:
                self._take_grant(stream, *self._early_grants.pop(stream))
            except Violation as e:
                self.violated(e)
        elif post.after is None:
            self._start(post)

    def abort(self, number: int) -> None:
        """End one half early. One that is only waiting for ZeroMQ to let go of its memory goes on to wait."""
        for post in [*self._sends.values(), *self._recvs.values()]:
            if post.number == number:
                self._end_early(post, "aborted here", "the other side aborted it")

    def moved(self, number: int) -> int:
        """Return how many bytes of a half have gone or come."""
        return next((p.passed for p in (*self._sends.values(), *self._recvs.values()) if p.number == number), 0)

    def advance(self, now: float, until: float) -> bool:
        """Do what can be done without waiting, sending no longer than ``until``.

        Returns whether to call again at once; else the descriptors and ``due`` tell when.
        """
        if not self.broken:
            self._connection.watch(now)
            if self._connection.lost:
                self.cut(self._connection.lost, "the other side cannot reach this one (any more)")
        for post in [p for p in self._fenced if p.after is None or p.after.passed()]:
            self._fenced.remove(post)
            self._start(post)
        again = not self.broken and self._send_all(until)
        self._retire(now)
        times = [now + RETRY_S] if self._fenced or self._retiring else []
        if self._connection.due is not None and not self.broken:
            times.append(self._connection.due)
        self.due = min(times, default=None)
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
        self.broken = PeerError(why)
        if tell is not None:
            self._say_bye(self, tell)
        self._connection.close()
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
                self._ready = True
                self._connection.reached()
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
        """Begin, as far as the peer is ready: the fence has passed."""
        if post.verb is Verb.RECV:
            if self._ready:
                self._grant(post)
        elif post.granted >= 0:
            self._sendable[post.stream] = post

    def _send_all(self, until: float) -> bool:
        """Control messages first, then frames as far as grants, ZeroMQ's queue and time allow."""
        while True:
            heard, room = self._connection.poll()
            if heard:
                self.cut(_text(memoryview(self._connection.hear())), None)
                return False
            if not room:
                return False
            if self._control:
                self._connection.say(*self._control.popleft())
            elif not self._send_frame():
                return False
            elif time.monotonic() > until:
                return True

    def _send_frame(self) -> bool:
        """Send one frame of the first stream that may; returns whether there was one."""
        while self._sendable:
            stream, post = next(iter(self._sendable.items()))
            nbytes = post.data.nbytes
            end = post.data.frame_end(post.passed) if post.passed < nbytes else nbytes
            # Grants move in steps larger than a frame, so one that is short of a whole frame will be moved.
            if end > post.granted:
                del self._sendable[stream]
                continue
            if end == nbytes:
                del self._sendable[stream]
            payload = post.data.read(post.passed, end) if nbytes else memoryview(b"")
            tracker = self._connection.lend(Header(Kind.DATA, stream, post.passed), payload)
            if tracker is None:
                return False
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


def _text(raw: memoryview) -> str:
    """Return a reason from the peer."""
    return bytes(raw[:200]).decode("utf-8", "replace") or "the peer gave no reason"
