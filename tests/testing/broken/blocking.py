"""Back ends whose calls take too long: while they do, nothing else moves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvxfer.geometry.region import Region
from kvxfer.testing import FakeTransport
from kvxfer.transport import Batch, Completion, Fence, Quieted


class SleepsInPoll(FakeTransport):
    def poll(self) -> list[Completion | Quieted]:
        time.sleep(0.15)
        return super().poll()


class SleepsInConnect(FakeTransport):
    def connect(self, mine: bytes, theirs: bytes) -> int:
        time.sleep(0.2)
        return super().connect(mine, theirs)


class SleepsInRegister(FakeTransport):
    def register(self, regions: Sequence[Region]) -> int:
        time.sleep(0.2)
        return super().register(regions)


class BurnsInSubmit(FakeTransport):
    """Computes for long, and never waits."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        until = time.thread_time() + 0.2
        while batch.nbytes > 1 << 20 and time.thread_time() < until:
            pass
        return super().submit(batch, after)


class BlocksOnLargeBatches(FakeTransport):
    def poll(self) -> list[Completion | Quieted]:
        if any(post.batch.nbytes >= 16 << 20 for side in self.links.values() for post in side.posts):
            time.sleep(0.3)
        return super().poll()


class BlocksNowAndThen(FakeTransport):
    """In every 300th call, as one that tidies its tables now and then."""

    polls = 0

    def poll(self) -> list[Completion | Quieted]:
        self.polls += 1
        if self.polls % 300 == 0:
            time.sleep(0.2)
        return super().poll()


class BlocksWithStoppedPeers(FakeTransport):
    """Waits for an answer to its abort."""

    def abort(self, batch: int) -> None:
        if any(side.other is not None and side.other.owner.stopped for side in self.links.values()):
            time.sleep(0.3)
        super().abort(batch)
