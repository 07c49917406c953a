"""Injected faults do what they say, and nothing else: a wrapper without faults is its inner back end."""

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import ConfigError
from kvxfer.geometry import Runs
from kvxfer.testing import ConformanceSuite, Network
from kvxfer.testing.conformance import ParticipantLink, Suite, TransferMode, World
from kvxfer.testing.conformance.content import overlay
from kvxfer.testing.faults import Faulty, Zeroing
from kvxfer.testing.participant import LocalParticipant

FAKE = "kvxfer.testing.fake:FakeTransport"
RUNS = Runs.of([0, 5000, 9000], [100, 2000, 60_000], [1000, 3000, 2000])


@pytest.mark.slow
class TestWithoutFaults(ConformanceSuite):
    backend = Faulty
    options: ClassVar[dict[str, Any]] = {"inner": "zmq"}
    rounds = 50


Meet = Callable[..., tuple[World, LocalParticipant, LocalParticipant, ParticipantLink]]


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Makes two connected participants on a faulty fake with the given options."""
    worlds = []

    def make(cls: type[Faulty] = Faulty, verbs: tuple[str, ...] = ("send", "recv"), **options: Any) -> Any:
        inner = {"network": Network(), "verbs": list(verbs)}

        class Here(Suite):
            backend = cls
            __test__ = False

        Here.options = {"inner": FAKE, "inner_options": inner, **options}
        world = World(Here())
        worlds.append(world)
        a, b, link = world.pair()
        return world, a, b, link

    yield make
    for world in worlds:
        world.close()


@pytest.mark.parametrize("way, verbs", [(TransferMode.SEND, ("send", "recv")), (TransferMode.READ, ("read",))])
def test_zeroing_blanks_the_longest_run_of_each_arrival(meet: Meet, way: TransferMode, verbs: tuple[str, ...]) -> None:
    world, a, b, link = meet(Zeroing, verbs)
    for _ in range(2):
        expected = overlay(b.content(0), a.content(0), RUNS)
        expected[2000:5000] = 0
        world.succeed(link.start(way, a, b, RUNS))
        assert (b.content(0) == expected).all()


def test_corruption_flips_one_byte(meet: Meet) -> None:
    world, a, b, link = meet(corrupt=1.0)
    expected = overlay(b.content(0), a.content(0), RUNS)
    source = a.content(0)
    world.succeed(link.start(TransferMode.SEND, a, b, RUNS))
    wrong = np.flatnonzero(b.content(0) != expected)
    assert len(wrong) == 1 and 2000 <= wrong[0] < 5000
    assert (a.content(0) == source).all()


@pytest.mark.parametrize("fault", ["fail", "corrupt"])
def test_a_fault_happens_about_as_often_as_asked(meet: Meet, fault: str) -> None:
    world, a, b, link = meet(**{fault: 0.3, "seed": 1})
    met = 0
    for _ in range(60):
        expected = overlay(b.content(0), a.content(0), RUNS)
        failed = [result.error for result in world.finish(link.start(TransferMode.SEND, a, b, RUNS)) if result.error]
        met += bool(failed) if fault == "fail" else not (b.content(0) == expected).all()
    assert 5 <= met <= 50


def test_a_lost_batch_ends_by_abort_only(meet: Meet) -> None:
    world, a, b, link = meet(lose=1.0)
    started = link.start(TransferMode.SEND, a, b, RUNS)
    world.run(0.2)
    assert not started.begun_to_end()
    for participant, number in started.halves:
        participant.abort(number)
    assert all(r.error is not None and "aborted" in r.error for r in world.finish(started))


def test_failure_is_reported(meet: Meet) -> None:
    world, a, b, link = meet(fail=1.0)
    before = b.content(0)
    assert all(
        r.error is not None and "told" in r.error for r in world.finish(link.start(TransferMode.SEND, a, b, RUNS))
    )
    assert (b.content(0) == before).all()


@pytest.mark.parametrize("way, verbs", [(TransferMode.SEND, ("send", "recv")), (TransferMode.READ, ("read",))])
def test_a_slow_link_moves_one_batch_after_the_other(meet: Meet, way: TransferMode, verbs: tuple[str, ...]) -> None:
    world, a, b, link = meet(verbs=verbs, bytes_per_s=float(RUNS.length.sum()) / 0.05)
    begun = time.monotonic()
    both = [link.start(way, a, b, RUNS) for _ in range(2)]
    world.succeed(both[0])
    assert not both[1].begun_to_end() or time.monotonic() - begun >= 0.1
    world.succeed(both[1])
    assert time.monotonic() - begun >= 0.1


def test_death_is_silent_here_and_noticed_there(meet: Meet) -> None:
    world, a, b, link = meet(verbs=("read",), die_after=3)
    for i in range(3):
        world.move(link, TransferMode.READ, a, b, Runs.of([i], [i], [100]))
    world.run(0.05)
    [result] = world.finish(link.start(TransferMode.READ, b, a, RUNS))
    assert result.error is not None and b.name in result.error


def test_a_back_end_that_only_writes_cannot_be_spoilt(meet: Meet) -> None:
    with pytest.raises(ConfigError, match="only writes"):
        meet(Zeroing, ("write",))
