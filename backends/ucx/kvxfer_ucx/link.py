"""One link: made, used by batches, and ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer import clock
from kvxfer.backend import LinkBase, Submitted
from kvxfer.errors import KvxferError, PeerError
from kvxfer.transport import Completion, Verb
from kvxfer_ucx.connection import Connection
from kvxfer_ucx.endpoint import Endpoint
from kvxfer_ucx.messages import OK, TRUNCATED, Pieces, Posted
from kvxfer_ucx.ways import Ways

STREAMS = 1 << 42
"""Stream numbers count modulo this: no two that are so far apart are under way at once."""

TAGS = STREAMS << 2
"""Tags of a side of a link differ in the bits below this."""

DRAIN_S = 5.0
"""How long UCX may take to let go of a dead link's batch before it is reported as one that may still be touched."""

PART_S = 1.0
"""How long a link that ends goes on with what is queued before its farewell, which UCX would throw away with the rest."""

LAST_S = 0.05
"""How long a link whose peer has closed its socket goes on with what that peer sent before: its farewell, if it could be sent."""

AT_ONCE = 2
"""Batches of GPU memory that are sent at a time. UCX shares the link among all that it has: more of them would end
together, and packing and unpacking would not overlap with anything."""

SWEEP_S = 0.005, 0.05
"""How often, while something moves, to throw away what strangers have sent: soon after some was found, and then ever more
seldom. What comes in between is all that they can pile up."""

_DATA, _ACK, _WELCOME, _BYE = 0, 1, 2, 3


@dataclass(eq=False)
class Half(Submitted):
    """This side's half of a batch; ``data`` is set once it is posted.

    A SEND is over when its peer has acknowledged it: UCX calls a send complete that lies in a buffer somewhere.
    """

    verb: Verb
    stream: int
    pieces: Pieces
    nbytes: int
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


class Link(LinkBase[Half]):
    """A link from this side, ``mine``, to ``theirs``. Each side makes an endpoint and welcomes the other.

    All methods on the data thread. Batches of a link that has ended end as soon as UCX has let go of their memory.
    """

    def __init__(
        self, ways: Ways, mine: Endpoint, theirs: Endpoint, timeout_s: float, done: Callable[[Completion], None]
    ) -> None:
        super().__init__(done, timeout_s)
        self.unreached = f"{theirs.agent!r} does not answer; is it alive, and can UCX reach it?"
        self.mine, self.theirs, self.liveness = mine, theirs, ways.liveness
        self.connection: Connection | None = None
        self.gone = self.parted = False
        self._ways = ways
        self._drain_by = self._part_by = math.inf
        self._down_at: float | None = None
        self._sweep, self._pause = clock.now(), SWEEP_S[0]
        self._heard: list[Posted] = []
        self._farewell: Posted | None = None
        self._met: Posted | None = None
        self._stuck: list[Half] = []
        self._said: list[Posted] = []
        self._choose()

    @property
    def plain(self) -> bool:
        return self.mine.plain and self.theirs.plain

    @property
    def busy(self) -> bool:
        """Whether messages of batches are under way."""
        return len(self.flights) > len(self.waiting)

    def _choose(self) -> None:
        """Take the way to the peer, once the peer has said which, and welcome it there."""
        try:
            connection = self._ways.choose()
        except PeerError as e:
            self.lose(f"{self.theirs.agent!r} cannot be reached: {e}; is it alive, and what may UCX use to get there?")
            return
        if connection is None:
            return
        self.connection, self._messages = connection, connection.messages
        self._welcome, self._answer, self._bye = self._heard = [
            self._messages.hear(self._tag(self.mine, kind, stream))
            for kind, stream in ((_WELCOME, 0), (_WELCOME, 1), (_BYE, 0))
        ]
        self._say(_WELCOME, 0, True)

    def failed(self, half: Half, why: Exception) -> str:
        return f"{half.verb} of {half.nbytes} bytes with {self.theirs.agent!r} failed: {why}"

    def due(self) -> float:
        """When ``step`` has to be called although UCX reports nothing."""
        if self.broken is None:
            return math.inf if self._down_at is None else self._down_at + LAST_S
        if not self.parted:
            return self._part_by
        return self._drain_by if self.flights else math.inf

    def step(self, now: float) -> None:
        """See how far things are."""
        if self.broken is None and self.connection is None:
            self._choose()
        if not self.up or self.waiting:
            self.look(now)
        if self.busy:
            self._finish()
        if self._said:
            self._said = [p for p in self._said if not p.done()]
        if self.broken is None:
            self._look_for_trouble(now)
        if self.broken is not None:
            self._part(now)
            self._end(now, self.broken)
        elif self.connection is not None and now >= self._sweep:
            found = self._messages.discard_strange(self.mine.tag, 2**64 - TAGS)
            self._pause = SWEEP_S[0] if found else min(2 * self._pause, SWEEP_S[1])
            self._sweep = now + self._pause

    def bye(self, cause: KvxferError, says: str | None) -> None:
        now = clock.now()
        self._drain_by, self._part_by = now + DRAIN_S, now + PART_S
        if self.connection is not None and self.connection.trouble() is None:
            self._farewell = self._say(_BYE, 0, True)  # over shared memory UCX would not tell
        for half in self.posted:
            half.cancel()
        self._part(now)

    def quiet(self) -> bool:
        """Whether the link has ended, and nothing of it is in flight."""
        if self.broken is None or self.flights:
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

    def greet(self) -> bool:
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
            self.lose(f"the connection with {self.theirs.agent!r} broke: {trouble}; connect again")
        elif (self.connection is not None and self._bye.done()) or self._hung_up(now):
            self.lose(f"{self.theirs.agent!r} has closed the link; connect again")

    def _hung_up(self, now: float) -> bool:
        """Whether a peer of this host closed its socket long enough ago that nothing which it sent before that is still to come."""
        if self.liveness is None or self.liveness.down is None:
            return False
        self._down_at = self._down_at or now
        return now >= self._down_at + LAST_S

    def may(self, half: Half) -> bool:
        if not super().may(half):
            return False
        if self.plain or half.verb is Verb.RECV:
            return True
        return sum(h.verb is Verb.SEND and not h.sent() for h in self.posted) < AT_ONCE

    def post(self, half: Half) -> None:
        if not half.nbytes:
            self.end(half)
            return
        if half.verb is Verb.RECV:
            half.data = self._messages.receive(
                half.pieces, half.nbytes, self._tag(self.mine, _DATA, half.stream), self.plain
            )
            return
        half.ack = self._messages.hear(self._tag(self.mine, _ACK, half.stream))
        tag = self._tag(self.theirs, _DATA, half.stream)
        half.data = self._messages.send(self._handle, half.pieces, half.nbytes, tag, self.plain)

    def _finish(self) -> None:
        """End what has ended by itself."""
        for half in [h for h in self.posted if h.done()]:
            status = half.status()
            if half.verb is Verb.RECV and status in (OK, TRUNCATED) and self.broken is None:
                self._say(_ACK, half.stream, status == OK)
            if status == OK:
                self.end(half)
            elif status == TRUNCATED:
                why = f"the peer's half has another size (stream {half.stream}); both must submit the same lengths"
                self.end(half, PeerError(why))
            else:
                # No accident of this batch alone: it shares its end with the others.
                why = self._messages.describe(status)
                self.lose(f"messages with {self.theirs.agent!r} fail: {why}; connect again")

    def _end(self, now: float, cause: KvxferError) -> None:
        """End the batches of a link that has ended, as UCX lets go of them."""
        for half in list(self.flights.values()):
            if half.done():
                self.end(half, cause)
            elif now >= self._drain_by:
                self.end(half, cause, quiet=False)
                self._stuck.append(half)

    def _say(self, kind: int, stream: int, yes: bool) -> Posted:
        said = self._messages.say(self._handle, self._tag(self.theirs, kind, stream), yes)
        self._said.append(said)
        return said

    @property
    def _handle(self) -> int:
        assert self.connection is not None  # it was chosen
        return self.connection.handle

    @staticmethod
    def _tag(receiver: Endpoint, kind: int, stream: int) -> int:
        return receiver.tag ^ (stream % STREAMS << 2 | kind)
