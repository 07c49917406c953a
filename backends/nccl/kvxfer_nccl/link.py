"""One link: a connection on which both sides talk, and what moves in each direction."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvxfer.backend.wakeup import Wakeup
from kvxfer.errors import KvxferError, PeerError, TransportError
from kvxfer.failures import FailureKind
from kvxfer.logs import logger
from kvxfer.transport.contract import Completion, Verb
from kvxfer_nccl.binding import Binding, Pipe, PipeSpec
from kvxfer_nccl.channel import Channel, dial
from kvxfer_nccl.direction import Broken, Direction, Post, Tools
from kvxfer_nccl.endpoint import Endpoint
from kvxfer_nccl.options import Options
from kvxfer_nccl.sides import Receiver, Sender
from kvxfer_nccl.tasks import Task
from kvxfer_nccl.wire import Bye, Greeting, Id, KeepOpen, Message, Opened, Ready, Received, Retire, Retired, Sent

log = logger("kvxfer.nccl")

T = TypeVar("T")

CLOGGED_S = 0.005
"""How often a connection that takes nothing at the moment is tried again."""


class Link:
    """A link from this side, ``mine``, to ``theirs``. All methods on the data thread.

    Its end is final: once ``broken`` is set, every batch ends with that error, and a new link has to be made. ``wake``
    is called from any thread when ``step`` should be. ``complete`` gets each batch's one end, and ``quieted`` the number of one that
    was not quiet then and is now.
    """

    def __init__(
        self,
        number: int,
        mine: Endpoint,
        theirs: Endpoint,
        binding: Binding,
        options: Options,
        device: str,
        wakeup: Wakeup,
        wake: Callable[[], None],
        complete: Callable[[Completion], None],
        quieted: Callable[[int], None],
    ) -> None:
        self.mine, self.theirs = mine, theirs
        self.broken: KvxferError | None = None
        self.number, self._options = number, options
        self._wakeup, self._wake, self._complete, self._quieted = wakeup, wake, complete, quieted
        self._channel: Channel | None = None
        self._heard = False  # the peer's Greeting, so that it has connected too
        self._reach_by = time.monotonic() + options.connect_timeout_s
        self._dialling: Task[socket.socket] | None = None
        self._bye: Bye | None = None  # what is said in the end
        self._leave_by: float | None = None  # has ended, but a communicator is still being made; until then at the most
        self._burials: list[Task[None]] = []
        self._touched: list[tuple[Post, Task[None] | None]] = []  # ended, but their abort is not over
        self._stuck: list[tuple[Post, Task[None]]] = []  # told to be over, though their abort is not

        agreed = msgspec.structs.replace(options, channels=min(mine.channels, theirs.channels))

        def spec(unique_id: bytes, sends: bool) -> PipeSpec:
            return PipeSpec(unique_id, sends, device, agreed)

        tools: Tools = Tools(binding, options, device, spec, self._say, complete, self._start, self._bury)
        self._sender, self._receiver = Sender(tools), Receiver(tools)
        if self.dials:
            self._dialling = self._start(lambda: dial(theirs.host, theirs.port, options.connect_timeout_s))

    @property
    def dials(self) -> bool:
        """Whether this side makes the connection: both know without asking."""
        return self.mine.token < self.theirs.token

    @property
    def over(self) -> bool:
        """Whether it has ended and nothing of it is left."""
        if self.broken is None:
            return False
        return self._leave_by is None and not (self._touched or self._burials or self._stuck)

    def direction(self, verb: Verb) -> Direction:
        return self._sender if verb is Verb.SEND else self._receiver

    def bytes_moved(self, number: int) -> int:
        """Return how many bytes of a batch have moved, as far as is known."""
        return self._sender.bytes_moved(number) or self._receiver.bytes_moved(number)

    def post(self, post: Post) -> None:
        if self.broken is not None:
            self._complete(Completion(post.number, self._error(post)))
        else:
            self.direction(post.verb).post(post, time.monotonic())

    def accept(self, channel: Channel) -> None:
        """Take a connection whose Greeting named this link."""
        if self._channel is not None or self.dials or self.broken is not None:
            channel.close()
            return
        self._heard = True
        self._use(channel)

    def step(self, now: float) -> float | None:
        """Go on as far as may be; returns when to be called again, at the latest."""
        due: list[float | None] = []
        if self.broken is None:
            try:
                self._talk()
                if self._heard:
                    due += [self._sender.step(now), self._receiver.step(now)]
                elif now > self._reach_by:
                    self._fail(PeerError("it has not answered in time; is it alive, and is its port reachable?"))
            except Broken as e:
                self._fail(PeerError(str(e), kind=e.kind), e.says, e.kind)
            except ValueError as e:
                self._fail(PeerError(f"it broke the protocol: {e}"), f"this side broke the protocol: {e}")
            except Exception as e:  # a call of the binding's: never the end of more than its link
                self._fail(
                    TransportError(f"NCCL failed on this side: {e}"),
                    f"its NCCL failed: {e}",
                    FailureKind.BACKEND_FAILED,
                )
        if self._leave_by is not None:
            due.append(self._leave(self._leave_by))
        self._burials = [b for b in self._burials if not b.well]
        for post, burial in self._stuck:
            if burial.well:
                self._quieted(post.number)
        self._stuck = [(post, burial) for post, burial in self._stuck if not burial.well]
        if self.broken is not None:
            due.append(self._settle())
        elif not self._heard:
            due.append(self._reach_by + 0.001)
        elif self._channel is not None and self._channel.clogged:
            due.append(now + CLOGGED_S)
        return min((d for d in due if d is not None), default=None)

    def end(self, cause: KvxferError, says: str) -> None:
        """End the link from this side: batches end with ``broken``, the other side hears ``says``."""
        if self.broken is None:
            self._fail(cause, says)

    def left(self, until: float) -> bool:
        """Go on with the goodbye of an ended link, until a time of ``time.monotonic`` at the most; whether it is over."""
        return self._leave_by is None or self._leave(min(until, self._leave_by)) is None

    def wait(self, until: float) -> bool:
        """After the goodbye, block until nothing of the link is left; whether that was so in time."""
        tasks = [*self._burials, *(b for _, b in self._touched if b is not None), *(b for _, b in self._stuck)]
        return sum(not task.wait(until) for task in tasks) == 0

    # The connection

    def _talk(self) -> None:
        if self._dialling is not None and self._dialling.done:
            dialling, self._dialling = self._dialling, None
            if dialling.error is not None:
                self._fail(PeerError(f"it cannot be reached ({dialling.error})"))
                return
            self._use(Channel(dialling.value))
            self._say(Greeting(self.theirs.token, self.mine.token))
        if self._channel is None:
            return
        self._channel.flush()
        for message in self._channel.hear():
            self._take(message)
            if self.broken is not None:
                return
        if self._channel.lost is not None:
            self._fail(PeerError(self._channel.lost))

    def _use(self, channel: Channel) -> None:
        self._channel = channel
        self._wakeup.add(channel.fileno(), self.number)
        if not self.dials:
            self._say(Greeting(self.theirs.token, self.mine.token))

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.say(message)

    def _take(self, message: Message) -> None:
        match message:
            case Greeting(yours, mine):
                if self._heard or (yours, mine) != (self.mine.token, self.theirs.token):
                    raise ValueError("a Greeting that does not belong here")
                self._heard = True
            case Ready(n):
                self._sender.take_ready(n)
            case Id(n, unique_id):
                self._receiver.take_id(n, unique_id)
            case Opened(n):
                self._sender.take_opened(n)
            case Sent():
                self._receiver.take_sent(message)
            case Received(stream):
                self._sender.take_done(stream)
            case Retire(n):
                self._sender.take_retire(n)
            case Retired(n):
                self._receiver.take_answer(n, keep=False)
            case KeepOpen(n):
                self._receiver.take_answer(n, keep=True)
            case Bye(reason, kind):
                self._fail(PeerError(reason or "the peer gave no reason", kind=kind))

    # Threads

    def _start(self, call: Callable[[], T]) -> Task[T]:
        return Task(call, self._wake)

    def _bury(self, pipe: Pipe) -> Task[None]:
        burial: Task[None] = Task(pipe.abort, self._wake)
        self._burials.append(burial)
        return burial

    # The end

    def _fail(self, cause: KvxferError, says: str | None = None, kind: FailureKind = FailureKind.PEER_LOST) -> None:
        """End everything. What NCCL has been given ends when its abort is over.

        ``says``: what to tell the other side; if ``None``, there is nobody to tell.
        """
        if self.broken is not None:
            return
        self.broken = cause
        if says is None:
            self._hang_up()
        else:
            self._bye = Bye(says[:500], kind)
        if self._dialling is not None:
            self._dialling.abandon(lambda sock: sock.close())
            self._dialling = None
        self._sender.finish(time.monotonic())
        for direction in (self._sender, self._receiver):
            untouched, touched, burial = direction.give_up()
            for post in untouched:
                self._complete(Completion(post.number, self._error(post)))
            self._touched += [(post, burial) for post in touched]
        self._leave_by = time.monotonic() + self._options.init_timeout_s
        self._leave(self._leave_by)
        self._wake()

    def _leave(self, until: float) -> float | None:
        """Say goodbye, but not while a communicator is being made; return when to be called again, or ``None`` once it is over.

        After ``until`` nothing is waited for.
        """
        try:
            self._hear_out()
            left = [self._sender.leave(), self._receiver.leave()]
            if self._channel is not None and not all(left) and time.monotonic() < until:
                return until
        except Exception as e:  # there is nothing to wait for, or nobody
            log.debug("the talk with %s ended early: %s", self.theirs, e)
        self._leave_by = None
        for direction in (self._sender, self._receiver):
            direction.drop()
        if self._bye is not None:
            self._say(self._bye)
        self._hang_up()
        return None

    def _hear_out(self) -> None:
        """Take what concerns communicators that are being made.

        Raises:
            Exception: The other side is gone, or breaks the protocol.
        """
        if self._channel is None:
            return
        self._channel.flush()
        for message in self._channel.hear():
            if isinstance(message, Ready | Id | Opened | Retire | Retired | KeepOpen):
                self._take(message)
            elif isinstance(message, Bye):
                raise PeerError(message.reason or "the peer gave no reason")
        if self._channel.lost is not None:
            raise PeerError(self._channel.lost)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._wakeup.remove(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _settle(self) -> float | None:
        """End batches whose abort is over, or takes too long; returns when the next one does."""
        waiting, self._touched = self._touched, []
        due = []
        for post, burial in waiting:
            if burial is None or burial.well:
                self._complete(Completion(post.number, self._error(post)))
                continue
            left = self._options.abort_timeout_s - burial.age
            if left > 0 and not burial.done:
                self._touched.append((post, burial))
                due.append(time.monotonic() + left + 0.001)
                continue
            self._complete(Completion(post.number, self._error(post), quiet=False))
            self._stuck.append((post, burial))
        return min(due, default=None)

    def _error(self, post: Post) -> KvxferError:
        assert self.broken is not None
        what = f"{post.verb} of {post.nbytes} bytes (stream {post.stream}) with {self.theirs}"
        return type(self.broken)(f"{what} failed: {self.broken}", kind=self.broken.kind)
