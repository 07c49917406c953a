"""One direction of a link: its batches in order, and the communicator through which they pass.

A communicator is made when both sides have something to move, so that neither waits long in NCCL's init::

    receiver                                   sender
    first RECV  -- Ready(n) ------------------>
                                               first SEND; makes a unique id
                <----------------- Id(n, id) --
    opens (thread)                             opens (thread)
    enqueues RECVs                             enqueues SENDs
                <------- Sent(stream, nbytes) -   for each; must be what the receiver expects
    a RECV is over when the stream has passed it and it was announced
                -- Received(stream) -------------->   a SEND is over when the stream has passed it and this came

and closed, which gives its memory back, when the receiver has had nothing to do for a while: ``Retire(n)``, answered by
``Retired(n)`` (both have closed it) or ``KeepOpen(n)`` (the sender has begun again). The next is number ``n + 1``.

A direction never waits, and knows no way to go on after an error: it raises ``Broken`` and the link ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvxfer.failures import FailureKind
from kvxfer.transport.contract import Completion, Fence, Verb
from kvxfer_nccl.binding import Binding, Mark, Pipe, PipeSpec
from kvxfer_nccl.options import Options
from kvxfer_nccl.tasks import Task
from kvxfer_nccl.wire import Id, KeepOpen, Message, Ready, Received, Retire, Retired, Sent

__all__ = ["Broken", "Direction", "Post", "Receiver", "Sender", "Tools"]

T = TypeVar("T")

ENQUEUED, GROUPED, RUNS = 32, 256, 2048
"""Batches enqueued at a time, runs that go into one launch, and runs enqueued at a time. CUDA takes about a thousand launches, and
NCCL a megabyte of work, before the next one blocks; and what is enqueued runs only when the peer has enqueued its half."""

EARLY = 4096
"""Batches that a peer may announce before we have submitted their other half."""

POLL_S = (0.00005, 0.005)
"""How often a mark is asked: at first, and when it has been waited for long."""

FENCE_S = 0.0003
"""How often a fence without a device event is asked."""

LIBRARY_S = 0.1
"""How often the library is asked for errors while something is under way."""


OURS = FailureKind.BACKEND_FAILED


class Broken(Exception):
    """The direction cannot go on. ``says``: what the other side should be told; ``kind``: whose fault it is."""

    def __init__(self, why: str, says: str, kind: FailureKind = FailureKind.PEER_LOST) -> None:
        super().__init__(why)
        self.kind = kind
        self.says = says


@dataclass(eq=False)
class Post:
    """This side's half of a batch.

    ``runs``: (address, bytes), none of them empty. ``taken``: how many of them are enqueued. ``mark``: set when all are.
    """

    number: int
    verb: Verb
    stream: int
    runs: list[tuple[int, int]]
    nbytes: int
    after: Fence | None
    taken: int = 0
    mark: Mark | None = None


@dataclass(frozen=True)
class Tools:
    """What a direction needs of its link. ``start`` runs a call on a thread; ``bury`` does so for one that ends a pipe."""

    binding: Binding
    options: Options
    device: str
    spec: Callable[[bytes, bool], PipeSpec]
    say: Callable[[Message], None]
    complete: Callable[[Completion], None]
    start: Callable[[Callable[[], T]], Task[T]]
    bury: Callable[[Pipe], Task[None]]


class Direction:
    """What both directions share. All on the data thread."""

    verb: Verb

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.n = 0  # of the communicator that is open, or would be next
        self.waiting: deque[Post] = deque()
        self.enqueued: deque[Post] = deque()  # of the last, some runs may be missing
        self._slices: deque[tuple[Mark, int]] = deque()  # what may still run, and its runs
        self.pipe: Pipe | None = None
        self.opening: Task[None] | None = None
        self.moved = 0.0  # when something last went on
        self._asked = 0.0

    @property
    def open(self) -> bool:
        return self.pipe is not None and self.opening is None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.enqueued)

    def post(self, post: Post, now: float) -> None:
        if not self.busy:
            self.moved = now
        self.waiting.append(post)

    def step(self, now: float) -> float | None:
        """Go on as far as may be; return when to be called again, at the latest, by ``time.monotonic``.

        Raises:
            Broken: The direction is of no more use.
        """
        self._opened()
        if self.open:
            self._enqueue()
            self._harvest(now)
            self._listen(now)
        return self._due(now)

    def give_up(self) -> tuple[list[Post], list[Post], Task[None] | None]:
        """End everything.

        Returns batches that have not touched memory, those that may until the abort is over, and the abort.
        """
        untouched, touched = list(self.waiting), list(self.enqueued)
        self.waiting.clear()
        self.enqueued.clear()
        burial = self._drop()
        return untouched, touched, burial

    def _open(self, unique_id: bytes) -> None:
        pipe = self.tools.binding.pipe(self.tools.spec(unique_id, self.verb is Verb.SEND))
        self.pipe, self.opening = pipe, self.tools.start(pipe.open)

    def _opened(self) -> None:
        """See what became of an opening."""
        if self.opening is None:
            return
        if self.opening.done:
            error, self.opening = self.opening.error, None
            self.moved = time.monotonic()
            if error is not None:
                raise Broken(f"a communicator could not be made: {error}", f"it could not make one: {error}", OURS)
        elif self.opening.age > self.tools.options.init_timeout_s:
            raise Broken(
                f"a communicator was not made within {self.tools.options.init_timeout_s:g} s",
                "it gave up waiting for a communicator",
            )

    def _drop(self) -> Task[None] | None:
        if self.pipe is None:
            return None
        burial = self.tools.bury(self.pipe)
        self.pipe = self.opening = None
        self._slices.clear()
        return burial

    def _enqueue(self) -> None:
        """Hand batches to the stream, in order, as far as their fences and the stream's room allow."""
        assert self.pipe is not None
        while self._room():
            if not self._cut:
                if not self.waiting or len(self.enqueued) >= ENQUEUED:
                    return
                after = self.waiting[0].after
                if after is not None:
                    if after.event is not None:
                        self.pipe.wait(after)
                    elif not after.passed():
                        return
                # Whatever comes of it, the stream may touch its memory from now on.
                self.enqueued.append(self.waiting.popleft())
            self._enqueue_some(self.enqueued[-1])

    def _enqueue_some(self, post: Post) -> None:
        assert self.pipe is not None
        runs = post.runs[post.taken : post.taken + GROUPED]
        if runs:
            self.pipe.move(runs)
        post.taken += len(runs)
        mark = self.pipe.mark()
        self._slices.append((mark, len(runs)))
        if post.taken == len(post.runs):
            post.mark = mark
            self._tell(post)

    @property
    def _cut(self) -> bool:
        """Whether runs of a batch are missing of which others are enqueued."""
        return bool(self.enqueued) and self.enqueued[-1].mark is None

    def _room(self) -> bool:
        while self._slices and self._slices[0][0].passed():
            self._slices.popleft()
        return sum(runs for _, runs in self._slices) <= RUNS - GROUPED

    def _tell(self, post: Post) -> None:
        """Note that a batch was enqueued."""

    def _harvest(self, now: float) -> None:
        raise NotImplementedError

    def _listen(self, now: float) -> None:
        """Ask the library whether all is well, if it has been silent for long."""
        if self.enqueued and now > max(self.moved, self._asked) + LIBRARY_S:
            self._asked = now
            assert self.pipe is not None
            error = self.pipe.error()
            if error is not None:
                raise Broken(f"the library reports {error}", f"its library reports {error}", OURS)

    def _due(self, now: float) -> float | None:
        due = []
        if self.opening is not None:
            due.append(now + max(0.0, self.tools.options.init_timeout_s - self.opening.age) + 0.001)
        if self.open:
            if self.enqueued and (self._cut or not self._idle_enqueued()):
                low, high = POLL_S
                due.append(now + min(high, max(low, (now - self.moved) / 8)))
            elif self.enqueued:
                due.append(now + LIBRARY_S)
            if self.waiting and len(self.enqueued) < ENQUEUED:
                due.append(now + FENCE_S)
        return min(due, default=None)

    def _idle_enqueued(self) -> bool:
        """Whether the next of the enqueued waits for the other side's word only, which wakes us by itself."""
        raise NotImplementedError


class Sender(Direction):
    """The direction in which this side sends."""

    verb = Verb.SEND

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._ready = False  # the receiver asks for communicator n
        self._naming: Task[bytes] | None = None
        self._acked = -1

    def take_ready(self, n: int) -> None:
        if self._ready or self.pipe is not None or n != self.n:
            raise ValueError(f"it asks for communicator {n}; the next is {self.n}")
        self._ready = True

    def take_done(self, stream: int) -> None:
        if not any(p.stream == stream for p in self.enqueued):
            raise ValueError(f"it has received stream {stream}, which is not under way")
        self._acked = stream

    def take_retire(self, n: int) -> None:
        if self.pipe is None or n != self.n:
            raise ValueError(f"it wants to close communicator {n}; open is {self.n if self.pipe else 'none'}")
        if self.busy or not self.open:
            self.tools.say(KeepOpen(n))
            return
        self._drop()
        self.n += 1
        self.tools.say(Retired(n))

    def step(self, now: float) -> float | None:
        if self._ready and self.waiting and self._naming is None:
            self._naming = self.tools.start(self.tools.binding.unique_id)
        if self._naming is not None and self._naming.done:
            naming, self._naming = self._naming, None
            if naming.error is not None:
                raise Broken(f"no unique id could be had: {naming.error}", "it could not make a communicator", OURS)
            self._ready = False
            self.tools.say(Id(self.n, naming.value))
            self._open(naming.value)
        return super().step(now)

    def finish(self, now: float) -> None:
        """Complete what is over, before the link ends."""
        if self.open:
            self._harvest(now)

    def _tell(self, post: Post) -> None:
        self.tools.say(Sent(post.stream, post.nbytes))

    def _harvest(self, now: float) -> None:
        while self.enqueued:
            post = self.enqueued[0]
            if post.mark is None or post.stream > self._acked or not post.mark.passed():
                return
            self.enqueued.popleft()
            self.moved = now
            self.tools.complete(Completion(post.number))

    def _idle_enqueued(self) -> bool:
        return self.enqueued[0].stream > self._acked


class Receiver(Direction):
    """The direction in which this side receives."""

    verb = Verb.RECV

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._asking = False  # Ready is said, its Id has not come
        self._retiring = False
        self._sent: deque[Sent] = deque()  # announced, not yet compared
        self._compared = 0  # how many of the enqueued have been announced

    @property
    def busy(self) -> bool:
        return super().busy or self._retiring

    def take_id(self, n: int, unique_id: bytes) -> None:
        if not self._asking or n != self.n:
            raise ValueError(f"it names communicator {n}, for which nobody asked")
        self._asking = False
        self._open(unique_id)

    def take_sent(self, sent: Sent) -> None:
        if len(self._sent) >= EARLY:
            raise ValueError(f"more than {EARLY} streams that this side does not know")
        self._sent.append(sent)

    def take_answer(self, n: int, keep: bool) -> None:
        if not self._retiring or n != self.n:
            raise ValueError(f"it answers about communicator {n}, about which nobody asked")
        self._retiring = False
        self.moved = time.monotonic()
        if not keep:
            self._drop()
            self.n += 1

    def step(self, now: float) -> float | None:
        if self.waiting and self.pipe is None and not self._asking:
            self._asking = True
            self.tools.say(Ready(self.n))
        due = super().step(now)
        if self.open and not self.busy:
            close = self.moved + self.tools.options.idle_close_s
            if now < close:
                return close if due is None else min(due, close)
            self._retiring = True
            self.tools.say(Retire(self.n))
        return due

    def _enqueue(self) -> None:
        if not self._retiring:
            super()._enqueue()

    def _harvest(self, now: float) -> None:
        while self._sent and self._compared < len(self.enqueued):
            self._compare(self.enqueued[self._compared], self._sent.popleft())
            self._compared += 1
        last = -1
        while self.enqueued and self._compared:
            post = self.enqueued[0]
            if post.mark is None or not post.mark.passed():
                break
            self.enqueued.popleft()
            self._compared -= 1
            self.moved, last = now, post.stream
            self.tools.complete(Completion(post.number))
        if last >= 0:
            self.tools.say(Received(last))

    @staticmethod
    def _compare(post: Post, sent: Sent) -> None:
        if (post.stream, post.nbytes) == (sent.stream, sent.nbytes):
            return
        # What is on its way now would end in the wrong place, and nothing else can be told apart from it.
        said = f"{sent.nbytes} bytes of stream {sent.stream} sent, {post.nbytes} bytes of stream {post.stream} expected"
        raise Broken(f"the halves do not fit: {said}", f"the halves do not fit: {said}")

    def _idle_enqueued(self) -> bool:
        return False
