"""Back ends whose batches end in the wrong way."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, ClassVar

from kvxfer import clock
from kvxfer.errors import PeerError
from kvxfer.testing import FakeTransport
from kvxfer.testing.network import LateBytes, PendingBatch
from kvxfer.transport import Completion, Quieted, Verb
from tests.testing.sound import GetsQuietLater

LATE_POLLS = 15
"""After how many polls what is late comes: when the test has looked, also on a host that stands still meanwhile."""


class SaysQuietTooSoon(FakeTransport):
    """Bytes of an aborted batch come late, although it was said to be quiet."""

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        self.late: list[PendingBatch] = []
        self.polls = 0

    def poll(self) -> list[Completion | Quieted]:
        self.polls += bool(self.late)
        if self.polls == LATE_POLLS:
            for post in self.late:
                post.due = 0.0
        done = super().poll()
        if 0 < self.polls < LATE_POLLS:
            self.wakeup.at(clock.now() + 0.001)
        return done

    def abort(self, batch: int) -> None:
        for side in self.links.values():
            for post in side.posts:
                if post.number == batch:
                    post.due = clock.now() + 3600.0
                    self.late.append(post)
                    self.completions.append(Completion(batch, PeerError(f"aborted, with {side.peer_agent}")))
                    self.wake()

    def finish(self, completion: Completion) -> None:
        pass


class ClosesQuietly(FakeTransport):
    """Tells its peers nothing when it closes."""

    def close(self) -> None:
        for side in self.links.values():
            side.other = None
            side.tokens = frozenset()
        for token in [t for t, owner in self._net._owners.items() if owner is self]:
            del self._net._owners[token]
        super().close()


class AbortsAllOfALink(FakeTransport):
    """What it declares is that an abort ends one batch."""

    def abort(self, batch: int) -> None:
        for side in self.links.values():
            if any(p.number == batch for p in side.posts):
                for post in [p for p in side.posts if not p.withdrawn]:
                    super().abort(post.number)


class SwapsResults(FakeTransport):
    """Of two batches that end in one poll, each gets the other's result."""

    def poll(self) -> list[Completion]:
        done = super().poll()
        if len(done) > 1:
            done[0], done[-1] = (
                dataclasses.replace(done[0], error=done[-1].error),
                dataclasses.replace(done[-1], error=done[0].error),
            )
        return done


class SaysItInWords(FakeTransport):
    """Its errors are strings."""

    def finish(self, completion: Completion) -> None:
        error: Any = completion.error and str(completion.error)
        super().finish(dataclasses.replace(completion, error=error))


class LeavesItsWritesBehind(FakeTransport):
    """Of an abort the target of a write is not told, and carries it out when it gets to it."""

    behind: ClassVar[list[PendingBatch]] = []

    def abort(self, batch: int) -> None:
        posts = [p for side in self.links.values() for p in side.posts if p.number == batch]
        self.behind.extend(p for p in posts if p.batch.verb is Verb.WRITE)
        super().abort(batch)

    def poll(self) -> list[Completion]:
        for post in [p for p in self.behind if p.side.other is not None and p.side.other.owner is self]:
            self.behind.remove(post)
            assert post.remote is not None
            there = self.memories.addresses(post.batch.remote, post.remote, post.lengths)
            for src, dst, n in zip(post.addresses.tolist(), there.tolist(), post.lengths.tolist(), strict=True):
                ctypes.memmove(dst, src, n)
        return super().poll()


class NeverGetsQuiet(GetsQuietLater):
    """The second word never comes."""

    def quieted(self, number: int) -> None:
        pass


class SaysQuietedTooSoon(GetsQuietLater):
    """The second word comes before the last byte has."""

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        self.late: list[LateBytes] = []
        self.polls = 0

    def complete(self, completion: Completion) -> None:
        super().complete(completion)
        if not completion.quiet:
            self.late.append(self._net._late.pop())
            super().quieted(completion.batch)

    def poll(self) -> list[Completion | Quieted]:
        self.polls += bool(self.late)
        if self.polls == LATE_POLLS:
            for late in self.late:
                late.move()
        done = super().poll()
        if 0 < self.polls < LATE_POLLS:
            self.wakeup.at(clock.now() + 0.001)
        return done


class SaysQuietedTwice(GetsQuietLater):
    def quieted(self, number: int) -> None:
        super().quieted(number)
        self.completions.append(Quieted(number))
