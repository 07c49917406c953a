"""The two machines against each other in a hostile world (``tests/protocol/world``), which checks every promise as it
goes: one outcome a side, by its deadline; never wrong bytes delivered; leases end; memory given back once and only when
quiet; nothing left behind; and the next transfer succeeds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source
from kvxfer.protocol import pace, parts
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.transitions import RANK_FETCH, RANK_SERVE
from kvxfer.protocol.values import Emit, Ended, LinkInfo, RankRoute, Resolved
from kvxfer.transitions import Life
from kvxfer.values import BlockTable, Fetch
from tests.protocol.world import SETTINGS, Script, Setting, World
from tests.protocol.world.base import LEASE, RANKS, TRANSFERS

STEPS = 100_000
NOISE = st.binary(min_size=500, max_size=2000)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are small, and bands pay over any link that has moved something, even here."""
    monkeypatch.setattr(parts, "MIN_CHECKED", 8)
    monkeypatch.setattr(parts, "HOST_BYTES", 8)
    monkeypatch.setattr(pace, "MIN_BYTES", 1)
    monkeypatch.setattr(pace, "PAYS_S", 0.0)


each_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


@pytest.mark.keep(8)
@each_setting
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=NOISE)
def test_promises_hold_whatever_happens(setting: Setting, script: bytes) -> None:
    World(setting, Script(script)).run()


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute of computing, and more where many tests share few cores
def test_promises_hold_for_100_000_steps_that_take_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[Any] = set()
    on = Life.on

    def record(self: Life[Any, Any], event: Any) -> bool:
        taken.add((self.state, event))
        return on(self, event)

    monkeypatch.setattr(Life, "on", record)
    delivered, short, banded, unasked, seed, begin = 0, 0, 0, 0, 0, World.steps
    while World.steps < begin + STEPS:
        for name, setting in SETTINGS.items():
            world = World(setting, Script(random.Random(f"{name} {seed}").randbytes(3000)))
            try:
                world.run()
            except AssertionError as e:
                raise AssertionError(f"{name}, seed {seed}: {e}") from e
            delivered += world.decodes.outcomes["delivered"]
            short += world.decodes.outcomes["short"]
            unasked += world.decodes.outcomes["unasked"]
            banded += world.banded
        seed += 1
    for life in (RANK_FETCH, RANK_SERVE):
        missed = sorted(map(str, set(life.moves) - taken))
        assert not missed, "transitions that nothing brings about"
        impossible = sorted(map(str, frozenset().union(*life.never.values()) & taken))
        assert not impossible, "what should never happen did"
    assert delivered > STEPS / 100 and short and unasked and banded > STEPS / 100


@each_setting
def test_all_is_delivered_when_nothing_goes_wrong(setting: Setting) -> None:
    world = World(replace(setting, faults=False), Script(b""))
    for transfer, total in TRANSFERS[:6]:
        world.prefills.prefill(transfer, total)
        world.decodes.fetch(transfer, total, world.source)
        world.elapse(0.1)
        for rank in range(RANKS):
            while world.prefills.orders[rank]:
                world.prefills.work(rank)
                world.elapse(0.1)
    world.end()
    assert world.banded, "what is computed layer by layer comes so"
    assert world.decodes.outcomes == {"delivered": 7 * RANKS, "whole": 7}  # the last is the world's own


@pytest.mark.keep(8)
@each_setting
def test_a_connection_that_breaks_costs_nothing_while_no_bytes_move(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when all bytes are here, and the producer's last word is lost with the link."""
    setting = replace(setting, lease=LEASE)
    for module in ("world", "engines"):  # so that there is time for all of it
        for name in ("START", "TIMEOUT"):
            monkeypatch.setattr(f"tests.protocol.world.{module}.{name}", 20.0)
    for moment in range(60):
        world = World(replace(setting, faults=False), Script(b""))
        world.prefills.prefill(*TRANSFERS[5])
        world.decodes.fetch(*TRANSFERS[5], world.source)
        for rank in range(RANKS):
            while world.prefills.orders[rank]:
                world.prefills.work(rank)
        world.elapse(moment / 20)
        if not all(op.done for op in world.backend.ops):
            continue  # bytes on their way are lost with their connection, and the transfer with them
        for consumer in world.consumers:
            for link in [x for x in consumer.links.values() if x.up_c]:  # others are none yet
                world.network.cut(link, again=True)
        world.end()
        assert world.decodes.outcomes == {"delivered": 2 * RANKS, "whole": 2}, f"cut after {moment / 20} s"


@each_setting
@pytest.mark.parametrize("enough", [4, 5])
def test_what_was_offered_when_the_producer_gave_up_is_delivered_where_that_is_enough(
    setting: Setting, enough: int
) -> None:
    """Up to the token that all of its ranks had offered: they lag, each behind the other."""
    world = World(replace(setting, faults=False), Script(b""))
    prefills, (transfer, total) = world.prefills, TRANSFERS[7]
    world.decodes.fetch(transfer, total, world.source, enough)
    generation = next(world.generations)
    for rank, chunk in enumerate((4, 6)):
        prefills._start(rank, transfer, total, generation)
        prefills._chunk(rank, transfer, 2)
        world.elapse(1.0)
        prefills._chunk(rank, transfer, chunk)
    world.elapse(1.0)
    for rank in range(RANKS):
        prefills._abort(rank, transfer, kept=True)
        world.elapse(0.5)
    world.end()
    if enough == 4:
        assert world.decodes.outcomes == {"delivered": 2 * RANKS, "whole": 2, "short": RANKS}
    else:
        assert world.decodes.outcomes == {"withdrawn": RANKS, "delivered": RANKS, "whole": 1}


class Hostile(RuleBasedStateMachine):
    """The same world, each step chosen by hypothesis."""

    @initialize(name=st.sampled_from(sorted(SETTINGS)), noise=st.binary(min_size=100, max_size=400))
    def begin(self, name: str, noise: bytes) -> None:
        self.world = World(SETTINGS[name], Script(noise))

    @rule(i=st.integers(0, 3))
    def prefill(self, i: int) -> None:
        self.world.prefills.prefill(*TRANSFERS[i])

    @rule(rank=st.integers(0, RANKS - 1), orders=st.integers(1, 6))
    def work(self, rank: int, orders: int) -> None:
        for _ in range(orders):
            self.world.prefills.work(rank)

    @rule(i=st.integers(0, 3))
    def fetch(self, i: int) -> None:
        self.world.decodes.fetch(*TRANSFERS[i], self.world.source)

    @rule()
    def cancel(self) -> None:
        self.world.decodes.cancel()

    @rule(times=st.integers(1, 20))
    def happen(self, times: int) -> None:
        for _ in range(times):
            self.world.happen()

    @rule(seconds=st.floats(0.01, 6.0))
    def elapse(self, seconds: float) -> None:
        self.world.elapse(seconds)

    @rule(rank=st.integers(0, RANKS - 1), again=st.booleans())
    def cut(self, rank: int, again: bool) -> None:
        for link in list(self.world.consumers[rank].links.values()):
            self.world.network.cut(link, again)

    @rule(role=st.sampled_from(["producer", "consumer"]))
    def crash(self, role: str) -> None:
        self.world.crash(role)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


def test_promises_hold_in_any_order_of_events() -> None:
    run_state_machine_as_test(
        Hostile,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_deadline_tells_why_the_link_had_to_be_made_anew() -> None:
    """The last that broke it would else be known to nobody, where each attempt breaks it again."""
    source, machine = Source("p", 1, 1), ConsumerMachine(5.0, 60.0)
    machine.fetch(Fetch("req", TRANSFERS[0][0], b"d", source, BlockTable.of([[0]]), 0, 4), 0.0)
    machine.resolved(source, Resolved((RankRoute("link", 1),)), 0.0)
    machine.link_up("link", LinkInfo("read", planner=None), 0.1)  # type: ignore[arg-type]
    machine.link_reset("link", Failure(FailureKind.PEER_LOST, "the cable was cut"), 1.0)
    [end] = [a.event for a in machine.tick(5.0) if isinstance(a, Emit) and isinstance(a.event, Ended)]
    assert end.outcome.kind is FailureKind.PEER_LOST
    assert (
        end.outcome.failure.detail
        == "nothing came within 5 s (still linking, because its link broke: the cable was cut)"
    )
