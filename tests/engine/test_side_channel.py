"""The side channel between processes of one host: what comes through, and what costs nobody anything."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvxfer.engine import Step, WorkerSide
from kvxfer.engine.side_channel import ChannelAddress, DirectFetches, RankResult, SideChannel, WorkerChannel
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Stages
from kvxfer.schedule import StepCommands
from kvxfer.values import BlockTable, Fetch, Group, Rank
from tests.engine.direct import Switchboard
from tests.engine.small import FACTS, Agent, Wire

LONG_S = 20.0
SOURCE = Source("127.0.0.1", 1, 1)


def fetches(blocks: int = 3) -> DirectFetches:
    what = TransferId("own/1/x", 0), b"d", SOURCE, BlockTable.of([range(blocks)]), 0, 16 * blocks
    return DirectFetches((Fetch("r", *what, number=7, lent=True),))


@dataclass
class Worker:
    rank: int
    got: queue.Queue[DirectFetches] = field(default_factory=queue.Queue)
    said: list[RankResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.channel = WorkerChannel(self.got.put, self.take)

    def take(self) -> list[RankResult]:
        out, self.said = self.said, []
        return out

    def say(self, result: RankResult) -> None:
        self.said.append(result)
        self.channel.wake()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker(i) for i in range(2)]
    yield made
    for worker in made:
        worker.channel.close()


@pytest.fixture
def channel(workers: list[Worker]) -> Iterator[SideChannel]:
    made = SideChannel()
    made.connect({Rank(0, w.rank): w.channel.address for w in workers})
    yield made
    made.close()


def test_fetches_reach_all_workers_and_results_the_scheduler(channel: SideChannel, workers: list[Worker]) -> None:
    assert channel.open and channel.send(fetches())
    assert all(worker.got.get(timeout=LONG_S) == fetches() for worker in workers)
    why = Failure(FailureKind.PEER_LOST, "it went away")
    sent = [RankResult("r", Rank(0, w.rank), 1, 3, why if w.rank else None, True, Stages(1.0, 2.0)) for w in workers]
    for worker, result in zip(workers, sent, strict=True):
        worker.say(result)
    found: list[RankResult] = []
    while len(found) < 2:
        news = channel.receive(LONG_S)
        assert news
        found += news
    assert sorted(found, key=lambda r: r.rank) == sent


def test_nothing_said_is_nothing_received(channel: SideChannel) -> None:
    assert channel.receive(0.0) == [] == channel.receive(0.01)


def test_a_fetch_too_long_for_a_message_waits_for_its_step(channel: SideChannel) -> None:
    assert not channel.send(fetches(100_000))
    assert channel.open and channel.send(fetches())


def test_a_worker_that_is_gone_closes_the_channel(channel: SideChannel, workers: list[Worker]) -> None:
    workers[1].channel.close()
    channel.receive(LONG_S)
    assert not channel.open and not channel.send(fetches())


def test_a_worker_on_another_host_leaves_all_to_the_steps(workers: list[Worker]) -> None:
    channel = SideChannel()
    channel.connect({Rank(0, 0): workers[0].channel.address, Rank(0, 1): ChannelAddress("kvxfer-elsewhere", b"")})
    assert not channel.open and not channel.send(fetches()) and channel.receive() == []


def test_who_does_not_know_the_secret_is_not_heard(workers: list[Worker]) -> None:
    address = workers[0].channel.address
    stranger = SideChannel()
    stranger.connect({Rank(): ChannelAddress(address.name, b"a guess of 16 by")})
    stranger.send(fetches())
    stranger.receive(LONG_S)
    assert not stranger.open
    crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(8)]
    for s in crowd:
        s.connect("\0" + address.name)  # and says nothing
    for s in crowd:
        s.close()
    ours = SideChannel()
    ours.connect({Rank(): address})
    assert ours.send(fetches()) and workers[0].got.get(timeout=LONG_S) == fetches()
    assert workers[0].got.empty()
    ours.close()


def test_nothing_goes_ahead_of_the_step_that_says_what_our_kv_depends_on() -> None:
    """A link that is made before that would be refused by its producer, and all fetches over it with it."""
    board, said = Switchboard(), list[str]()

    class Told(Agent):
        def identify(self, facts: dict[str, str]) -> None:
            said.append("facts")

        def prepare(self, source: Any, own: Any = None) -> None:
            said.append("prepare")

        def fetch(self, fetch: Fetch) -> None:
            said.append(fetch.handle)

    agent: Any = Told(Wire(), [Group(16)], Rank(0, 0))
    worker = WorkerSide(agent, channel=board.worker)
    (end,) = board.ends.values()
    ahead = fetches()
    end.take(DirectFetches(prepare=((SOURCE, None),)))
    end.take(ahead)
    assert said == []
    worker.begin(Step(StepCommands(fetches=ahead.fetches), facts=FACTS))
    assert said == ["facts", "prepare", "r"]
    worker.load(Step(StepCommands(fetches=ahead.fetches)))
    end.take(DirectFetches(prepare=((SOURCE, None),)))
    assert said == ["facts", "prepare", "r", "prepare"], "what comes again with its step has begun; and no more waits"
