"""Parts of a link that is closed: they end as such, whoever's turn it was, and leave nothing to be done."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import pytest

from kvxfer.data.commands import Connect, Disconnect, EndpointMade, MakeEndpoint, Result
from kvxfer.data.data_thread import DataThread
from kvxfer.data.policy import stager
from kvxfer.data.quarantine import Limits
from kvxfer.failures import FailureKind
from kvxfer.geometry import Cache, Planner, route
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Move, Moved, PartRef
from kvxfer.testing.fake import FakeTransport, Network
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Verb

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


class Receiver:
    """A data thread that receives, and the bare back end of its peer, which sends nothing."""

    def __init__(self) -> None:
        net = Network()
        options: dict[str, Any] = {"network": net, "verbs": ["send", "recv"]}
        self._memory = np.zeros((1, 256, 4, 1024), np.uint8)
        cache = Cache.of_tensors(self._memory, "layer block token unit")
        self._planner = Planner(cache, cache, route([cache], [cache])[cache.rank].assignments[cache.rank])
        self.results: list[Result] = []
        self.data = DataThread(
            "fake",
            lambda: EndsLater("receiver", options),
            cache.regions,
            stager(cache, 8 * 4096),
            self.results.append,
            Limits(grace=5.0, quarantine=1 << 40),
        )
        self.data.start(5.0)
        self.data.post(MakeEndpoint(LINK, 1, "fake", "consumer"))
        made = self.wait(EndpointMade)[0]
        self.peer = FakeTransport("sender", options)
        theirs = self.peer.endpoint()
        self.data.post(Connect(LINK, 1, made.endpoint, theirs))
        self.peer.connect(theirs, made.endpoint)

    def receive(self, number: int, piece_bytes: int) -> None:
        plan = self._planner.plan([range(64)], [range(64 * number, 64 * number + 64)], 0, 256)
        ref = PartRef("consumer", LINK, TransferId("own/1/x", number), 1, 1)
        self.data.post(Move(ref, Verb.RECV, plan, number + 1, piece_bytes))

    def wait(self, sort: type, count: int = 1) -> list[Any]:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            if len(found := [r for r in self.results if isinstance(r, sort)]) >= count:
                return found
            time.sleep(0.002)
        raise AssertionError(f"{count} x {sort.__name__} did not come: {self.results}")

    def close(self) -> None:
        self.data.close(5.0)
        self.peer.close()


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
