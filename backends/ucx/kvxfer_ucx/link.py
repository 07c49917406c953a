"""One link: made, used by batches, and ended."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from kvxfer.errors import KvxferError, PeerError
from kvxfer.transport import Completion, Fence, Verb
from kvxfer_ucx.connection import Connection
from kvxfer_ucx.endpoint import Endpoint
from kvxfer_ucx.messages import OK, TRUNCATED, Pieces, Posted
from kvxfer_ucx.ways import Ways

STREAMS = 1 << 42
"""Stream numbers count modulo this: no two that are so far apart are under way at once."""

TAGS = STREAMS << 2
"""Tags of a side of a link differ in the bits below this."""

CHUNKS = 8
"""The parts in which the time to make a link is given. Each begins when the one before is seen to be over, so a host that stands
still for a while, peer and all, uses up one."""

DRAIN_S = 5.0
"""How long UCX may take to let go of a dead link's batch before it is reported as one that may still be touched."""

PART_S = 1.0
"""How long a link that ends goes on with what is queued before its farewell, which UCX would throw away with the rest."""

LAST_S = 0.05
"""How long a link whose peer has closed its socket goes on with what that peer sent before: its farewell, if it could be sent."""

FENCE_INTERVAL_S = 0.00005, 0.0005
"""How often a fence is asked whether it has passed: at first (packing on a GPU takes no longer), and in the end."""

AT_ONCE = 2
"""Batches of GPU memory that are sent at a time. UCX shares the link among all that it has: more of them would end
together, and packing and unpacking would not overlap with anything."""

SWEEP_S = 0.005, 0.05
"""How often, while something moves, to throw away what strangers have sent: soon after some was found, and then ever more
seldom. What comes in between is all that they can pile up."""

_DATA, _ACK, _WELCOME, _BYE = 0, 1, 2, 3


@dataclass(eq=False)
class Half:
    """This side's half of a batch.

    It waits, with ``data`` unset, until the link is made and the fence has passed. A SEND is over when its peer has
    acknowledged it: UCX calls a send complete that lies in a buffer somewhere.
    """

    number: int
    verb: Verb
    stream: int
    pieces: Pieces
    nbytes: int
    after: Fence | None
    data: Posted | None = None
    ack: Posted | None = None

    def done(self) -> bool:
        """Whether UCX has ended all that was posted for it."""
        return (self.data is None or self.data.done()) and (self.ack is None or self.ack.done())

    def sent(self) -> bool:
        """Whether UCX has ended its message, heard of or not."""
        return self.data is not None and self.data.done()

    def status(self) -> int:
        """Return what came of it, once ``done``."""
        assert self.data is not None  # it was posted
        if self.verb is Verb.RECV and self.data.status == OK and self.data.nbytes != self.nbytes:
            return TRUNCATED
        return self.data.status or (OK if self.ack is None else self.ack.status)

    def cancel(self) -> None:
        for posted in (self.data, self.ack):
            if posted is not None:
                posted.cancel()


class Link:
    """A link from this side, ``mine``, to ``theirs``. All methods on the data thread.

    Each side makes an endpoint and welcomes the other. Its end is final: once ``broken`` is set, every batch ends with that error,
    and a new link has to be made.
    """

    def __init__(self, ways: Ways, mine: Endpoint, theirs: Endpoint, now: float, timeout_s: float) -> None:
        self.mine, self.theirs, self.liveness = mine, theirs, ways.liveness
        self.connection: Connection | None = None
        self.broken: KvxferError | None = None
        self.gone = self.parted = False
        self._ways = ways
        self._chunk_s, self._chunks = timeout_s / CHUNKS, CHUNKS
        self._due = self._part_by = now + self._chunk_s
        self._down_at: float | None = None
        self._sweep, self._pause = now, SWEEP_S[0]
        self._open = False
        self._heard: list[Posted] = []
        self._farewell: Posted | None = None
        self._met: Posted | None = None
        self._waiting: deque[Half] = deque()
        self._interval = FENCE_INTERVAL_S[0]
        self._going: list[Half] = []
        self._stuck: list[Half] = []
        self._said: list[Posted] = []
        self._choose(now)

    @property
    def plain(self) -> bool:
        return self.mine.plain and self.theirs.plain

    @property
    def busy(self) -> bool:
        """Whether messages of batches are under way."""
        return bool(self._going)

    def _choose(self, now: float) -> None:
        """Take the way to the peer, once the peer has said which, and welcome it there."""
        try:
            connection = self._ways.choose()
        except PeerError as e:
            self.fail(
                PeerError(
                    f"{self.theirs.agent!r} cannot be reached: {e}; is it alive, and what may UCX use to get there?"
                ),
                now,
            )
            return
        if connection is None:
            return
        self.connection, self._messages = connection, connection.messages
        self._welcome, self._answer, self._bye = self._heard = [
            self._messages.hear(self._tag(self.mine, kind, stream))
            for kind, stream in ((_WELCOME, 0), (_WELCOME, 1), (_BYE, 0))
        ]
        self._say(_WELCOME, 0, True)

    def submit(self, half: Half) -> list[Completion]:
        """Take a batch, and post what may go now.

        What was packed before it may be ready meanwhile, and a caller that submits several does not step before the last. Returns
        batches that have ended with that.
        """
        self._waiting.append(half)
        ended = self._start() if self._open and self.broken is None else []
        self._interval = FENCE_INTERVAL_S[0]
        return ended

    def moved(self, number: int) -> int:
        """Return the bytes of a batch's messages that have ended."""
        return next((half.data.nbytes for half in self._going if half.number == number and half.data is not None), 0)

    def due(self, now: float) -> float:
        """When ``step`` has to be called although UCX reports nothing."""
        if self.broken is None and self._open:
            last = math.inf if self._down_at is None else self._down_at + LAST_S
            return min(last, now + self._interval if self._waiting else math.inf)
        if self.broken is not None and not self.parted:
            return self._part_by
        return self._due if self.broken is None or self._going else math.inf

    def step(self, now: float) -> list[Completion]:
        """See how far things are; returns the batches that have ended."""
        ended: list[Completion] = []
        if self.broken is None and self.connection is None:
            self._choose(now)
        if self.broken is None:
            self._open = self._open or self._meet()
            if self._open and self._waiting:
                ended += self._start()
        if self._going:
            ended += self._finish(now)
        if self._said:
            self._said = [p for p in self._said if not p.done()]
        if self.broken is None:
            self._look_for_trouble(now)
        if self.broken is not None:
            self._part(now)
            ended += self._end(now)
        elif self.connection is not None and now >= self._sweep:
            found = self._messages.discard_strange(self.mine.tag, 2**64 - TAGS)
            self._pause = SWEEP_S[0] if found else min(2 * self._pause, SWEEP_S[1])
            self._sweep = now + self._pause
        return ended

    def fail(self, cause: KvxferError, now: float) -> None:
        """End the link. Batches end in the next steps, as soon as UCX has let go of their memory."""
        if self.broken is not None:
            return
        self.broken, self._due, self._part_by = cause, now + DRAIN_S, now + PART_S
        if self.connection is not None and self.connection.trouble() is None:
            self._farewell = self._say(_BYE, 0, True)  # over shared memory UCX would not tell
        for half in self._going:
            half.cancel()
        self._part(now)

    def quiet(self) -> bool:
        """Whether the link has ended, and nothing of it is in flight."""
        if self.broken is None or self._waiting or self._going:
            return False
        posted: list[Posted | Half] = [*self._heard, *self._said, *self._stuck]
        return all(p.done() for p in posted) and (self.connection is None or self.connection.closed())

    def drop(self) -> list[int]:
        """Forget all that UCX keeps for a link that is ``quiet``. Returns the batches that were not quiet when they ended."""
        stuck, self.gone, self._stuck = self._stuck, True, []
        if self.connection is not None:
            self.connection.destroy()
        return [half.number for half in stuck]

    def _part(self, now: float) -> None:
        """Close the connection once the farewell is on its way, or nobody waits for it any more."""
        if self.parted:
            return
        if self.connection is None:
            self._ways.close()
        elif (self._farewell is None or self._farewell.done()) or self._bye.done() or now >= self._part_by:
            for posted in self._heard:
                posted.cancel()
            self.connection.close()
        else:
            return
        self.parted = True

    def _meet(self) -> bool:
        """Whether the two sides have met.

        One that has heard the other's welcome answers it, and waits for the receipt: only with that has UCX all it
        needs to notice the other's death. It also waits for the other's answer, because the receipt of that must not come after
        what this side sends: over a slow link, the other would then wait for it too long. On one host, the sockets have to show
        that it is the process whose endpoint this is; UCX goes by tags alone.
        """
        if self.connection is None or (self.liveness is not None and not self.liveness.up):
            return False
        if self._met is None and self._welcome.done() and self._welcome.status == OK:
            self._met = self._messages.greet(self.connection.handle, self._tag(self.theirs, _WELCOME, 1))
            self._said.append(self._met)
        return self._met is not None and all(p.done() and p.status == OK for p in (self._met, self._answer))

    def _look_for_trouble(self, now: float) -> None:
        trouble = None if self.connection is None else self.connection.trouble()
        if trouble is not None:
            self.fail(PeerError(f"the connection with {self.theirs.agent!r} broke: {trouble}; connect again"), now)
        elif (self.connection is not None and self._bye.done()) or self._hung_up(now):
            self.fail(PeerError(f"{self.theirs.agent!r} has closed the link; connect again"), now)
        elif not self._open and now >= self._due:
            self._chunks -= 1
            self._due = now + self._chunk_s
            if self._chunks:
                return
            self.fail(PeerError(f"{self.theirs.agent!r} does not answer; is it alive, and can UCX reach it?"), now)

    def _hung_up(self, now: float) -> bool:
        """Whether a peer of this host closed its socket long enough ago that nothing which it sent before that is still to come."""
        if self.liveness is None or self.liveness.down is None:
            return False
        self._down_at = self._down_at or now
        return now >= self._down_at + LAST_S

    def _start(self) -> list[Completion]:
        """Post what may go now."""
        ended: list[Completion] = []
        for half in list(self._waiting):
            if half.after is not None and not half.after.passed():
                continue
            if not half.nbytes:
                ended.append(Completion(half.number))
            elif self._may(half):
                self._post(half)
            else:
                continue
            self._waiting.remove(half)
        self._interval = min(2 * self._interval, FENCE_INTERVAL_S[1])
        return ended

    def _may(self, half: Half) -> bool:
        """Whether it may go now, as far as others are concerned."""
        if self.plain or half.verb is Verb.RECV:
            return True
        return sum(h.verb is Verb.SEND and not h.sent() for h in self._going) < AT_ONCE

    def _post(self, half: Half) -> None:
        self._going.append(half)
        if half.verb is Verb.RECV:
            half.data = self._messages.receive(
                half.pieces, half.nbytes, self._tag(self.mine, _DATA, half.stream), self.plain
            )
            return
        half.ack = self._messages.hear(self._tag(self.mine, _ACK, half.stream))
        tag = self._tag(self.theirs, _DATA, half.stream)
        half.data = self._messages.send(self._handle, half.pieces, half.nbytes, tag, self.plain)

    def _finish(self, now: float) -> list[Completion]:
        """Take out what has ended by itself."""
        ended: list[Completion] = []
        for half in [h for h in self._going if h.done()]:
            status = half.status()
            if half.verb is Verb.RECV and status in (OK, TRUNCATED) and self.broken is None:
                self._say(_ACK, half.stream, status == OK)
            if status == OK:
                ended.append(Completion(half.number))
            elif status == TRUNCATED:
                why = f"the peer's half has another size (stream {half.stream}); both must submit the same lengths"
                ended.append(Completion(half.number, PeerError(f"{self._what(half)}: {why}")))
            else:
                # No accident of this batch alone: it shares its end with the others.
                why = self._messages.describe(status)
                self.fail(PeerError(f"messages with {self.theirs.agent!r} fail: {why}; connect again"), now)
                continue
            self._going.remove(half)
        return ended

    def _end(self, now: float) -> list[Completion]:
        """Batches of a link that has ended, as UCX lets go of them."""
        ended = [Completion(h.number, self._error(h)) for h in self._waiting]
        self._waiting.clear()
        free = [h for h in self._going if h.done()]
        self._going = [h for h in self._going if h not in free]
        ended += [Completion(h.number, self._error(h)) for h in free]
        if now >= self._due:
            ended += [Completion(h.number, self._error(h), quiet=False) for h in self._going]
            self._stuck, self._going = self._stuck + self._going, []
        return ended

    def _say(self, kind: int, stream: int, yes: bool) -> Posted:
        said = self._messages.say(self._handle, self._tag(self.theirs, kind, stream), yes)
        self._said.append(said)
        return said

    @property
    def _handle(self) -> int:
        assert self.connection is not None  # it was chosen
        return self.connection.handle

    def _what(self, half: Half) -> str:
        return f"{half.verb} of {half.nbytes} bytes with {self.theirs.agent!r}"

    def _error(self, half: Half) -> KvxferError:
        assert self.broken is not None
        return type(self.broken)(f"{self._what(half)} failed: {self.broken}", kind=self.broken.kind)

    @staticmethod
    def _tag(receiver: Endpoint, kind: int, stream: int) -> int:
        return receiver.tag ^ (stream % STREAMS << 2 | kind)
