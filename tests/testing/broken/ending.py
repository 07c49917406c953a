"""Back ends whose batches end in the wrong way."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, ClassVar

from kvxfer import clock
from kvxfer.errors import PeerError
from kvxfer.testing import FakeTransport
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.network import PendingBatch
from kvxfer.transport import Completion, Quieted, Verb
from tests.testing.sound import GetsQuietLater


class SaysQuietTooSoon(FakeTransport):
    """Bytes of an aborted batch come late, although it was said to be quiet.

    They come after the test has looked, also on a host that stands still meanwhile.
    """

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        self.late: list[tuple[float, PendingBatch]] = []

    def poll(self) -> list[Completion | Quieted]:
        for comes, post in self.late:
            if thread_clock() < comes:
                post.due = clock.now() + 0.02
        return super().poll()

    def abort(self, batch: int) -> None:
        for side in self.links.values():
            for post in side.posts:
                if post.number == batch:
                    self.late.append((thread_clock() + 0.1, post))
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

    def complete(self, completion: Completion) -> None:
        super().complete(completion)
        if not completion.quiet:
            super().quieted(completion.batch)

    def poll(self) -> list[Completion | Quieted]:
        for late in self._net._late:
            if late.side.owner is self and late.quiet_at < clock.now() + 0.02:
                late.move()
        return super().poll()


class SaysQuietedTwice(GetsQuietLater):
    def quieted(self, number: int) -> None:
        super().quieted(number)
        self.completions.append(Quieted(number))
