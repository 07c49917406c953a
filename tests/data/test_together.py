"""Short parts that are read share a batch, and nothing else: each has its own outcome, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import PeerError, TransportError
from kvxfer.identity import TransferId
from kvxfer.testing import Network
from kvxfer.testing.fake import FakeTransport, LinkEnd
from kvxfer.transport import Batch, Completion, Fence
from tests.control.conftest import Ended, FailureKind, Released, SeededEngine, fetch, offered, until

MANY = 40
SPOILT = 7
"""The block, and the transfer into it, with which something is wrong."""
BLOCK_BYTES = 256


class Counting(FakeTransport):
    """Counts batches, and refuses those that fill a block of its choice: at once, or when they would move."""

    started: ClassVar[list[int]] = []
    refuses: ClassVar[str] = ""

    def start(self, number: int, link: LinkEnd, batch: Batch, after: Fence | None) -> None:
        if self.refuses and SPOILT * BLOCK_BYTES in batch.local_offsets.tolist():
            if self.refuses == "at once":
                raise TransportError("it is refused")
            self.complete(Completion(number, PeerError("it has failed")))
            return
        self.started.append(len(batch.lengths))
        super().start(number, link, batch, after)


class Pair:
    """Two engines with a link over which something has been fetched."""

    def __init__(self, engine: Callable[..., SeededEngine], **options: Any) -> None:
        Counting.started, Counting.refuses = [], ""
        self.net = Network()
        options = {"backend": "tests.data.test_together:Counting", "network": self.net, "run_bytes": 1, **options}
        self.p, self.d = engine(dict(options), blocks=64, seed=1), engine(dict(options), blocks=64)
        self.fetch(MANY)
        self.ends(1)
        Counting.started.clear()

    def fetch(self, block: int) -> None:
        transfer = TransferId("own/1/x", block)
        self.p.agents[0].offer(offered([self.source(block)], 4, transfer=transfer))
        self.d.agents[0].fetch(fetch(self.p.source, [block], 4, transfer=transfer, handle=str(block)))

    def fetch_many(self) -> None:
        """Fetch many so that the data thread finds all of them, or all but the first, at the same time."""
        with self.net.lock:
            for block in range(MANY):
                self.fetch(block)
            until(lambda: sum(side.agents[0].stats().direct for side in (self.p, self.d)) > MANY)

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Let nothing move meanwhile."""
        name = self.p.agents[0]._name
        self.net.stop(name)
        yield
        self.net.resume(name)

    def ends(self, count: int) -> dict[str, Ended]:
        return {end.handle: end for end in self.d.wait(Ended, count=count)}

    def right(self, block: int) -> bool:
        return np.array_equal(self.d.block(block), self.p.block(self.source(block)))

    @staticmethod
    def source(block: int) -> int:
        """Return the producer's block; the runs of two blocks that follow each other on both sides would be one."""
        return MANY - block


def test_short_parts_of_a_turn_share_batches(engine: Callable[..., SeededEngine]) -> None:
    pair = Pair(engine, verbs=["read"])
    pair.fetch_many()
    assert all(end.outcome.delivered for end in pair.ends(MANY + 1).values())
    assert all(map(pair.right, range(MANY)))
    assert len(Counting.started) <= 3, "more than the first by itself and two that are shared"


@pytest.mark.parametrize(
    "options", [{"verbs": ["write"]}, {"verbs": ["send", "recv"]}, {"verbs": ["read"], "quiet": "backend_reset"}]
)
def test_what_could_not_be_begun_anew_shares_none(engine: Callable[..., SeededEngine], options: dict[str, Any]) -> None:
    pair = Pair(engine, **options)
    pair.fetch_many() if options["verbs"] != ["send", "recv"] else [pair.fetch(block) for block in range(MANY)]
    assert all(end.outcome.delivered for end in pair.ends(MANY + 1).values())
    assert all(map(pair.right, range(MANY)))
    assert len(Counting.started) >= MANY


@pytest.mark.parametrize("refuses", ["at once", "later"])
def test_only_the_part_fails_with_which_something_is_wrong(engine: Callable[..., SeededEngine], refuses: str) -> None:
    pair = Pair(engine, verbs=["read"])
    Counting.refuses = refuses
    pair.fetch_many()
    ends = pair.ends(MANY + 1)
    assert [end.handle for end in ends.values() if not end.outcome.delivered] == [str(SPOILT)]
    assert all(pair.right(block) for block in range(MANY) if block != SPOILT)


def test_who_gives_one_up_ends_no_other(engine: Callable[..., SeededEngine]) -> None:
    pair = Pair(engine, verbs=["read"])
    with pair.standstill():
        pair.fetch_many()
        until(lambda: sum(Counting.started) >= MANY * 3)  # a run for each layer
        pair.d.agents[0].cancel(str(SPOILT), "nobody wants it")
        until(lambda: any(e.handle == str(SPOILT) for e in pair.d.events() if isinstance(e, Released)))
        pair.d.block(SPOILT)[:] = 0  # is somebody else's now
    ends = pair.ends(MANY + 1)
    failure = ends.pop(str(SPOILT)).outcome.failure
    assert failure is not None and failure.kind is FailureKind.CANCELLED
    assert all(end.outcome.delivered for end in ends.values())
    assert all(pair.right(block) for block in range(MANY) if block != SPOILT)
    assert not pair.d.block(SPOILT).any()
