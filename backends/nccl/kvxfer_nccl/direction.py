"""What both directions of a link share: batches in order, and the communicator through which they pass.

``sides.py`` has the two directions and what they say to each other. Neither ever waits, and neither knows a way to go on after an
error: it raises ``Broken`` and the link ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvxfer import clock
from kvxfer.backend import Submitted
from kvxfer.failures import FailureKind
from kvxfer.transport.contract import Verb
from kvxfer_nccl.binding import Binding, Mark, Pipe, PipeSpec
from kvxfer_nccl.options import Options
from kvxfer_nccl.tasks import Task
from kvxfer_nccl.wire import Message

T = TypeVar("T")

ENQUEUED, GROUPED, RUNS = 32, 256, 2048
"""Batches enqueued at a time, runs that go into one launch, and runs enqueued at a time. CUDA takes about a thousand launches, and
NCCL a megabyte of work, before the next one blocks; and what is enqueued runs only when the peer has enqueued its half."""

POLL_S = (0.00005, 0.005)
"""How often a mark is asked: at first, and when it has been waited for long."""

FENCE_S = 0.0005
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
class Post(Submitted):
    """This side's half of a batch.

    ``runs``: (address, bytes), none of them empty. ``taken``: how many of them are enqueued. ``mark``: set when all are.
    ``behind``: how many runs of this direction were enqueued before them.
    """

    verb: Verb
    stream: int
    runs: list[tuple[int, int]]
    nbytes: int
    taken: int = 0
    behind: int = 0
    mark: Mark | None = None


@dataclass(frozen=True)
class Tools:
    """What a direction needs of its link. ``start`` runs a call on a thread; ``bury`` does so for one that ends a pipe."""

    binding: Binding
    options: Options
    device: str
    spec: Callable[[bytes, bool], PipeSpec]
    say: Callable[[Message], None]
    end: Callable[[Post], None]
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
        self._handed = self._passed = 0  # runs: enqueued in all, and those that are known not to run any more
        self.pipe: Pipe | None = None
        self.opening: Task[None] | None = None
        self.joined = True  # whether the other side has come as far as this one needs
        self.moved = 0.0  # when something last went on
        self._asked = 0.0

    @property
    def open(self) -> bool:
        return self.pipe is not None and self.opening is None

    @property
    def making(self) -> bool:
        """Whether the other side may be waiting in NCCL's init, or will be."""
        return self.opening is not None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.enqueued)

    def post(self, post: Post, now: float) -> None:
        if not self.busy:
            self.moved = now
        self.waiting.append(post)

    def step(self, now: float) -> float | None:
        """Go on as far as may be; return when to be called again, at the latest, by ``kvxfer.clock``.

        Raises:
            Broken: The direction is of no more use.
        """
        self._opened()
        if self.open:
            self._enqueue()
            self._harvest(now)
            self._listen(now)
        return self._due(now)

    def bytes_moved(self, post: Post) -> int:
        """Return the bytes of the runs of a batch that the stream has passed."""
        return sum(n for _, n in post.runs[: max(self._passed - post.behind, 0)]) if post in self.enqueued else 0

    def give_up(self) -> tuple[list[Post], list[Post], Task[None] | None]:
        """End everything, except that a communicator that is being made has to be made first, by ``leave``.

        Returns batches that have not touched memory, those that may until the abort is over, and the abort.
        """
        untouched, touched = list(self.waiting), list(self.enqueued)
        self.waiting.clear()
        self.enqueued.clear()
        return untouched, touched, None if self.making else self.drop()

    def leave(self) -> bool:
        """After ``give_up``, go on with a communicator that is being made; return whether none is.

        Raises:
            Exception: It cannot be made.
        """
        self._opened()
        return not self.making

    def drop(self) -> Task[None] | None:
        """Leave nothing behind that can be had back; return what ends the communicator, if there is one."""
        if self.pipe is None:
            return None
        burial = self.tools.bury(self.pipe)
        self.pipe = self.opening = None
        self._slices.clear()
        self._passed = self._handed
        return burial

    def _open(self, unique_id: bytes) -> None:
        pipe = self.tools.binding.pipe(self.tools.spec(unique_id, self.verb is Verb.SEND))
        self.pipe, self.opening = pipe, self.tools.start(pipe.open)

    def _opened(self) -> None:
        """See what became of an opening."""
        if self.opening is None:
            return
        if self.opening.done and (self.joined or self.opening.error is not None):
            error, self.opening = self.opening.error, None
            self.moved = clock.now()
            if error is not None:
                raise Broken(f"a communicator could not be made: {error}", f"it could not make one: {error}", OURS)
        elif self.opening.age > self.tools.options.init_timeout_s:
            raise Broken(
                f"a communicator was not made within {self.tools.options.init_timeout_s:g} s",
                "it gave up waiting for a communicator",
            )

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
                self.enqueued[-1].behind = self._handed
            self._enqueue_some(self.enqueued[-1])

    def _enqueue_some(self, post: Post) -> None:
        assert self.pipe is not None
        runs = post.runs[post.taken : post.taken + GROUPED]
        if runs:
            self.pipe.move(runs)
        post.taken += len(runs)
        self._handed += len(runs)
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
            self._passed += self._slices.popleft()[1]
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
