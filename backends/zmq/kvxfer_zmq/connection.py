"""The connection that carries our side of a link: a DEALER socket at the peer's ROUTER, and what becomes of it."""

from __future__ import annotations

import sys
from collections.abc import Hashable

import zmq

from kvxfer.backend.wakeup import Wakeup
from kvxfer_zmq.curve import Keys
from kvxfer_zmq.endpoint import Endpoint
from kvxfer_zmq.options import Options
from kvxfer_zmq.wire import Header, password, routing_id

QUEUED_MESSAGES = 8
"""Messages that ZeroMQ holds for a link on this side; they can be cut off only together with the link."""

COPIED = 16 << 10
"""Bytes up to which a copy costs less than to be told that ZeroMQ needs the memory no more."""
_LET_GO = zmq.MessageTracker()

# Plain numbers: arithmetic on zmq's flag types costs microseconds.
NOBLOCK, SNDMORE, POLLIN, POLLOUT = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN), int(zmq.POLLOUT)

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)


def waiting(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Asking is what makes the socket's descriptor tell of the next one."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & POLLIN)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Return the frames of a message, or none where none waits."""
    frames: list[zmq.Frame] = []
    try:
        while not frames or frames[-1].more:  # asking the socket for that costs three times as much
            frames.append(socket.recv(NOBLOCK, copy=False))
    except zmq.Again:
        pass
    return frames


class Connection:
    """Never reconnects: a lost connection is a lost link. ``key`` is what ``wakeup`` calls it.

    ``reached`` says whether it was made, ``lost`` why nothing can be sent any more, or ``None``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: Options,
        keys: Keys | None,
        mine: Endpoint,
        theirs: Endpoint,
        wakeup: Wakeup,
        key: Hashable,
    ) -> None:
        self.lost: str | None = None
        self.reached = False
        self._wakeup = wakeup
        self._dealer = context.socket(zmq.DEALER)
        try:
            self._set_up(options, keys, mine, theirs)
        except BaseException:
            self._dealer.close(0)  # or the context would never end
            raise
        for socket in (self._dealer, self._monitor):
            wakeup.add(socket.fileno(), key)
        try:
            self._dealer.connect(theirs.address)
        except zmq.ZMQError as e:
            self.lost = f"its address cannot be used: {e}"

    def _set_up(self, options: Options, keys: Keys | None, mine: Endpoint, theirs: Endpoint) -> None:
        patience, heartbeat = int(options.connect_timeout_s * 1000), int(options.heartbeat_s * 1000)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.SNDHWM, QUEUED_MESSAGES),
            (zmq.MAXMSGSIZE, 1 << 16),
            (zmq.ROUTING_ID, routing_id(theirs.token, mine.token)),
            (zmq.IPV6, "[" in theirs.address),
            (zmq.CONNECT_TIMEOUT, patience),
            (zmq.HANDSHAKE_IVL, patience),
            (zmq.HEARTBEAT_IVL, heartbeat),
            (zmq.HEARTBEAT_TIMEOUT, 5 * heartbeat),
            (zmq.HEARTBEAT_TTL, 5 * heartbeat),
        ):
            self._dealer.setsockopt(option, value)
        if keys is None:
            self._dealer.setsockopt(zmq.PLAIN_USERNAME, b"peer")
            self._dealer.setsockopt(zmq.PLAIN_PASSWORD, password(theirs.token))
        else:
            keys.dial(self._dealer, theirs.key)
        self._monitor = self._dealer.get_monitor_socket(_EVENTS)

    @property
    def over(self) -> bool:
        """Whether nothing can be sent any more. Any thread."""
        return self.lost is not None or bool(self._dealer.closed)

    def watch(self) -> None:
        """See what became of the connection; may set ``reached`` or ``lost``."""
        while waiting(self._monitor):
            # Its first two bytes. pyzmq's own decoder keeps an object for ever for each value that comes with one, such as descriptors.
            event = int.from_bytes(self._monitor.recv_multipart(NOBLOCK)[0][:2], sys.byteorder)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.reached = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._lose("the connection was lost (its process ended, or its host does not answer)")
            elif event == zmq.EVENT_CLOSED:
                self._lose("it cannot be reached (nobody listens there)")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._lose("the other side does not know this link (it closed it, or was restarted)")
            else:
                self._lose("it cannot be reached (what listens there gave no fitting answer)")

    def poll(self) -> tuple[bool, bool]:
        """(something to ``hear``, room to send). What is not true now is told of by a descriptor."""
        events = int(self._dealer.getsockopt(zmq.EVENTS))
        return bool(events & POLLIN), bool(events & POLLOUT)

    def hear(self) -> bytes:
        """Return what the peer's ROUTER answers; it only ever does to say that, and why, the link is over."""
        frames = self._dealer.recv_multipart(NOBLOCK)
        return frames[1] if len(frames) == 2 else b"the link is over"

    def say(self, header: Header, payload: bytes = b"") -> None:
        """Send a short message."""
        try:
            self._dealer.send(header.encode(), NOBLOCK | SNDMORE)
            self._dealer.send(payload, NOBLOCK)
        except zmq.Again:
            pass  # there was room, so the connection has just been lost; ``watch`` will see it

    def lend(self, header: Header, payload: memoryview) -> zmq.MessageTracker | None:
        """Send memory, without a copy unless it is little; the tracker is done when ZeroMQ has let go of it. ``None``: not sent."""
        try:
            self._dealer.send(header.encode(), NOBLOCK | SNDMORE)
            if payload.nbytes <= COPIED:
                self._dealer.send(payload, NOBLOCK)
                return _LET_GO
            return self._dealer.send(payload, NOBLOCK, copy=False, track=True)
        except zmq.Again:
            return None  # as in ``say``

    def close(self) -> None:
        """Drop what has not left, so that ZeroMQ lets go of all memory. Idempotent."""
        if not self._dealer.closed:
            for socket in (self._dealer, self._monitor):
                self._wakeup.remove(socket.fileno())
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._dealer.close(0)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
