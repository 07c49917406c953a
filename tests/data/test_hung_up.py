"""Parts of a link that is closed: they end as such, whoever's turn it was, and leave nothing to be done."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import closing
from typing import Any

import pytest

from kvxfer.data.commands import Disconnect, LinkBroken, Reset
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Move, Moved, PartRef
from kvxfer.testing.fake import FakeTransport
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Verb
from tests.data.harness import Alone

LINK = b"link"


class EndsLater(FakeTransport):
    """The batches of a link that is closed end a while after that, as those of a library do that cannot be interrupted."""

    polls = 0

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        self._leaving: list[tuple[float, LinkEnd]] = []

    def drop_link(self, number: int, link: LinkEnd) -> None:
        self._leaving.append((time.monotonic() + 0.1, link))

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        EndsLater.polls += 1
        for due, link in [left for left in self._leaving if left[0] <= time.monotonic()]:
            self._leaving.remove((due, link))
            self._net.unlink(link)
        super().advance(readable)
        if self._leaving:
            self.wakeup.at(self._leaving[0][0])


class Receiver(Alone):
    """A data thread that receives, and the bare back end of its peer, which sends nothing."""

    def __init__(self) -> None:
        super().__init__(lambda options: EndsLater("receiver", options), grace=5.0, verbs=["send", "recv"])
        self.connect(LINK, 1)

    def receive(self, number: int, piece_bytes: int) -> None:
        plan = self._planner.plan([range(64)], [range(64 * number, 64 * number + 64)], 0, 256)
        ref = PartRef("consumer", LINK, TransferId("own/1/x", number), 1, 1)
        self.data.post(Move(ref, Verb.RECV, plan, number + 1, piece_bytes))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def test_parts_that_wait_for_their_turn_end_with_the_link(receiver: Receiver) -> None:
    """They were begun over the closed link, failed as if the back end were broken, and were waited for ever after."""
    receiver.receive(0, 4096)  # has its turn for long: its pieces do not fit into the slots of a link
    for number in (1, 2):
        receiver.receive(number, 0)
    receiver.data.post(Disconnect(LINK))
    ends = receiver.wait(Moved, 3)
    assert {e.failure.kind for e in ends if e.failure is not None} == {FailureKind.PEER_LOST}, ends
    assert all("the link was closed" in str(e.failure) for e in ends), ends
    before = EndsLater.polls
    time.sleep(1.0)
    assert EndsLater.polls - before < 8, "nothing is left to be waited for"


class Endless(FakeTransport):
    """The batches of a link that is closed end only when the back end is closed."""

    def drop_link(self, number: int, link: LinkEnd) -> None:
        pass


def test_a_batch_that_outlives_its_link_ends_in_bounded_time_and_does_not_cost_the_next_link() -> None:
    """The next link was broken for it each time that it had been made, and its memory was never released."""
    with closing(Alone(lambda options: Endless("receiver", options), verbs=["send", "recv"])) as side:
        side.connect(LINK, 1)
        side.move(LINK, 1, Verb.RECV)
        side.data.post(Disconnect(LINK))
        side.connect(LINK, 2)
        (end,) = side.wait(Moved)
        assert end.quiet and end.failure is not None
        assert side.wait(Reset) and not [r for r in side.results if isinstance(r, LinkBroken)]
