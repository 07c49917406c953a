"""One link: a connection on which both sides talk, and what moves in each direction."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvxfer import clock
from kvxfer.backend import LinkBase
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


class Link(LinkBase[Post]):
    """A link from this side, ``mine``, to ``theirs``. All methods on the data thread.

    ``wake`` is called from any thread when ``step`` should be. ``quieted`` gets the number of a batch that was not quiet at its end and
    is now.
    """

    unreached = "it has not answered in time; is it alive, and is its port reachable?"

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
        super().__init__(complete, options.connect_timeout_s)
        self.mine, self.theirs = mine, theirs
        self.number, self._options = number, options
        self._wakeup, self._wake, self._quieted = wakeup, wake, quieted
        self._channel: Channel | None = None
        self._heard = False  # the peer's Greeting, so that it has connected too
        self._dialling: Task[socket.socket] | None = None
        self._blame = FailureKind.PEER_LOST  # the kind of failure that the other side hears of
        self._bye: Bye | None = None  # what is said in the end
        self._leave_by: float | None = None  # has ended, but a communicator is still being made; until then at the most
        self._burials: list[Task[None]] = []
        self._touched: list[tuple[Post, Task[None] | None]] = []  # ended, but their abort is not over
        self._stuck: list[tuple[Post, Task[None]]] = []  # told to be over, though their abort is not

        agreed = msgspec.structs.replace(options, channels=min(mine.channels, theirs.channels))

        def spec(unique_id: bytes, sends: bool) -> PipeSpec:
            return PipeSpec(unique_id, sends, device, agreed)

        tools: Tools = Tools(binding, options, device, spec, self._say, self.end, self._start, self._bury)
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

    def failed(self, post: Post, why: Exception) -> str:
        return f"{post.verb} of {post.nbytes} bytes (stream {post.stream}) with {self.theirs} failed: {why}"

    def greet(self) -> bool:
        return self._heard

    def may(self, post: Post) -> bool:
        """Return true: a direction is a stream, in which each batch waits for its own fence and for those before it."""
        return True

    def post(self, post: Post) -> None:
        self.direction(post.verb).post(post, clock.now())

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
                    self.look(now)
                    due += [self._sender.step(now), self._receiver.step(now)]
            except Broken as e:
                self._blame = e.kind
                self.cut(PeerError(str(e), kind=e.kind), e.says)
            except ValueError as e:
                self.lose(f"it broke the protocol: {e}", f"this side broke the protocol: {e}")
            except Exception as e:  # a call of the binding's: never the end of more than its link
                self._blame = FailureKind.BACKEND_FAILED
                self.cut(TransportError(f"NCCL failed on this side: {e}"), f"its NCCL failed: {e}")
        if self._leave_by is not None:
            due.append(self._leave(self._leave_by))
        self._burials = [b for b in self._burials if not b.well]
        for post, burial in self._stuck:
            if burial.well:
                self._quieted(post.number)
        self._stuck = [(post, burial) for post, burial in self._stuck if not burial.well]
        if self.broken is not None:
            due.append(self._settle(self.broken))
        elif self._channel is not None and self._channel.clogged:
            due.append(now + CLOGGED_S)
        return min((d for d in due if d is not None), default=None)

    def left(self, until: float) -> bool:
        """Go on with the goodbye of an ended link, until a time of ``kvxfer.clock`` at the most; whether it is over."""
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
                self.lose(f"it cannot be reached ({dialling.error})")
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
            self.lose(self._channel.lost)

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
                self.cut(PeerError(reason or "the peer gave no reason", kind=kind))

    # Threads

    def _start(self, call: Callable[[], T]) -> Task[T]:
        return Task(call, self._wake)

    def _bury(self, pipe: Pipe) -> Task[None]:
        burial: Task[None] = Task(pipe.abort, self._wake)
        self._burials.append(burial)
        return burial

    # The end

    def bye(self, cause: KvxferError, says: str | None) -> None:
        """End everything. What NCCL has been given ends when its abort is over."""
        if says is None:
            self._hang_up()
        else:
            self._bye = Bye(says[:500], self._blame)
        if self._dialling is not None:
            self._dialling.abandon(lambda sock: sock.close())
            self._dialling = None
        self._sender.finish(clock.now())
        for direction in (self._sender, self._receiver):
            untouched, touched, burial = direction.give_up()
            for post in untouched:
                self.end(post, cause)
            self._touched += [(post, burial) for post in touched]
        self._leave_by = clock.now() + self._options.init_timeout_s
        self._leave(self._leave_by)
        self._wake()

    def _leave(self, until: float) -> float | None:
        """Say goodbye, but not while a communicator is being made; return when to be called again, or ``None`` once it is over.

        After ``until`` nothing is waited for.
        """
        try:
            self._hear_out()
            left = [self._sender.leave(), self._receiver.leave()]
            if self._channel is not None and not all(left) and clock.now() < until:
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

    def _settle(self, cause: KvxferError) -> float | None:
        """End batches whose abort is over, or takes too long; returns when the next one does."""
        waiting, self._touched = self._touched, []
        due = []
        for post, burial in waiting:
            if burial is None or burial.well:
                self.end(post, cause)
                continue
            left = self._options.abort_timeout_s - burial.age
            if left > 0 and not burial.done:
                self._touched.append((post, burial))
                due.append(clock.now() + left + 0.001)
                continue
            self.end(post, cause, quiet=False)
            self._stuck.append((post, burial))
        return min(due, default=None)
