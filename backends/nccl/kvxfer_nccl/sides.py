"""The two directions of a link: the side that sends and the side that receives, and what they say to each other.

A communicator is made when both sides have something to move. So neither waits long in NCCL's init. The messages are::

    receiver                                   sender
    first RECV  -- Ready(n) ------------------>
                                               first SEND; makes a unique id
                <----------------- Id(n, id) --
    opens (thread)                             opens (thread)
                -- Opened(n) ----------------->
    enqueues RECVs                             enqueues SENDs
                <------- Sent(stream, nbytes) -   for each; must be what the receiver expects
    a RECV is over when the stream has passed it and it was announced
                -- Received(stream) -------------->   a SEND is over when the stream has passed it and this came

It is closed, which gives its memory back, when the receiver has had nothing to do for a while: ``Retire(n)``, answered by
``Retired(n)`` (both have closed it) or ``KeepOpen(n)`` (the sender has begun again). The next is number ``n + 1``.

NCCL's init cannot be given up: if one side does not come, the other's thread waits for ever, and what it holds is lost. So once a
unique id is made, both come, and neither goes before the other has come, even if the link has ended meanwhile (``leave``). The
receiver knows by the first word that it receives, the sender by ``Opened(n)``. A receiver that has only asked takes that back with
``Retire(n)``, and comes if ``KeepOpen(n)`` is the answer. What is left is a peer that dies in the middle of init.
"""

from __future__ import annotations

from collections import deque

from kvxfer import clock
from kvxfer.transport.contract import Verb
from kvxfer_nccl.direction import OURS, Broken, Direction, Post, Tools
from kvxfer_nccl.tasks import Task
from kvxfer_nccl.wire import Id, KeepOpen, Opened, Ready, Received, Retire, Retired, Sent

EARLY = 4096
"""Batches that a peer may announce before we have submitted their other half."""


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

    def take_opened(self, n: int) -> None:
        if self.opening is None or self.joined or n != self.n:
            raise ValueError(f"it has opened communicator {n}, which is not being made")
        self.joined = True

    def take_done(self, stream: int) -> None:
        if not any(p.stream == stream for p in self.enqueued):
            raise ValueError(f"it has received stream {stream}, which is not under way")
        self._acked = stream

    def take_retire(self, n: int) -> None:
        if n != self.n or not (self._ready or self.pipe):
            raise ValueError(f"it wants to close communicator {n}; open is {self.n if self.pipe else 'none'}")
        if self.busy and self.pipe is not None or self.making:
            self.tools.say(KeepOpen(n))
            return
        self._ready = False
        self.drop()
        self.n += 1
        self.tools.say(Retired(n))

    @property
    def making(self) -> bool:
        return self._naming is not None or super().making

    def step(self, now: float) -> float | None:
        if self._ready and self.waiting and self._naming is None:
            self._naming = self.tools.start(self.tools.binding.unique_id)
        self._named()
        return super().step(now)

    def leave(self) -> bool:
        self._named()
        return super().leave()

    def _named(self) -> None:
        """Begin to open, if the unique id has been made."""
        if self._naming is None or not self._naming.done:
            return
        naming, self._naming = self._naming, None
        if naming.error is not None:
            raise Broken(f"no unique id could be had: {naming.error}", "it could not make a communicator", OURS)
        self._ready = self.joined = False
        self.tools.say(Id(self.n, naming.value))
        self._open(naming.value)

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
            self.tools.end(post)

    def _idle_enqueued(self) -> bool:
        return self.enqueued[0].stream > self._acked


class Receiver(Direction):
    """The direction in which this side receives."""

    verb = Verb.RECV

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._asking = False  # Ready is said, its Id has not come
        self._retiring = False  # Retire is said, its answer has not come
        self._taken_back = False  # Retire was said of what was asked for
        self._sent: deque[Sent] = deque()  # announced, not yet compared
        self._compared = 0  # how many of the enqueued have been announced

    @property
    def busy(self) -> bool:
        return super().busy or self._retiring

    @property
    def making(self) -> bool:
        return self._asking or super().making

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
        self.moved = clock.now()
        if not keep:
            self._asking = False
            self.drop()
            self.n += 1

    def _opened(self) -> None:
        opening = self.opening
        super()._opened()
        if opening is not None and self.opening is None:
            self.tools.say(Opened(self.n))

    def leave(self) -> bool:
        if self._asking and not self._taken_back:
            self._taken_back = self._retiring = True
            self.tools.say(Retire(self.n))
        return super().leave()

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
            self.tools.end(post)
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
