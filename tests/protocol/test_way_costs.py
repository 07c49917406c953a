"""The way of a part is chosen by what parts have cost, against an oracle that knows a simulated link's true costs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.geometry import HOST
from kvxfer.protocol.cost import PAYS, TRIAL_S, TRIALS, TRIED, LinkCost, PartWay, cheapest, guess
from kvxfer.protocol.parts import IN_DOUBT, way_costs, ways
from kvxfer.protocol.values import LinkInfo
from tests.protocol.test_pieces import planner

MIB, KIB = 1 << 20, 1 << 10
DEVICE = LinkInfo("read", planner("cuda:0"), piece_bytes=128 * MIB, stage_below=4 * MIB)
HOSTS = LinkInfo("read", planner(HOST), piece_bytes=16 * MIB, stage_below=2 * KIB)

# Seconds for a part, a descriptor, a piece, a byte, and a packed byte in one piece and among several.
VIRTUAL = LinkCost(1e-3, 1e-6, 1e-3, 7e-12, 7e-12, 5e-12)
QUIET = LinkCost(2e-4, 5e-6, 2e-4, 3e-12, 1e-12, 0.7e-12)
CARD = LinkCost(2e-4, 1e-6, 4e-4, 20e-12, 2e-12, 1e-12)
DEAR = LinkCost(2e-4, 50e-6, 4e-4, 20e-12, 2e-12, 1e-12)
LINKS = {"virtual machine": VIRTUAL, "quiet host": QUIET, "network card": CARD, "dear descriptors": DEAR}

SHAPES = {
    "rows of 256 KiB": [(n, 256 * KIB) for n in (64, 256, 512, 4096)],
    "rows of 2 MiB": [(n, 2 * MIB) for n in (8, 64, 512)],
    "many lengths": [(n, row) for n in (16, 256, 2048) for row in (128 * KIB, 1 * MIB, 8 * MIB)],
}


@dataclass
class Simulated:
    """A link with true costs, the side that learns them, and what it has cost beside what it might have."""

    true: LinkCost
    info: LinkInfo = DEVICE
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    noise: float = 0.3
    held_up: float = 0.03  # the share of parts that take ten times as long
    took: float = 0.0
    by_guess: float = 0.0
    least: float = 0.0
    sorts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.costs = way_costs(self.info)

    def move(self, rows: int, row: int) -> PartWay:
        """Move a part by the way that is chosen for it."""
        choice = ways(rows, rows * row, self.info)
        way = cheapest(choice, self.costs.ask(rows, rows * row))
        seconds = self.true.seconds(way)
        self.took += seconds
        self.by_guess += self.true.seconds(choice[0])
        self.least += min(map(self.true.seconds, choice))
        late = 10 if self.dice.random() < self.held_up else 1
        self.costs.took(way, seconds * math.exp(self.dice.gauss(0.0, self.noise)) * late)
        self.costs.learn()
        self.sorts.append(way.sort)
        return way

    def many(self, shapes: Sequence[tuple[int, int]], parts: int) -> tuple[float, float]:
        """Move parts of these shapes; return what they took, over the least and over what the first guess takes."""
        self.took = self.by_guess = self.least = 0.0
        for _ in range(parts):
            self.move(*self.dice.choice(shapes))
        return self.took / self.least, self.took / self.by_guess


def seeds() -> Iterator[random.Random]:
    for seed in range(4):
        yield random.Random(seed)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("true", LINKS.values(), ids=LINKS)
def test_little_is_lost_against_one_who_knows_the_link(true: LinkCost, shapes: list[tuple[int, int]]) -> None:
    """While learning, hardly more than the first guess takes; then hardly more than the least, but for what does not pay a tenth."""
    for dice in seeds():
        link = Simulated(true, dice=dice)
        _, learning = link.many(shapes, 600)
        assert learning < 1.06
        least, guessed = link.many(shapes, 600)
        assert guessed < 1.03 and least < 1.05 / PAYS


@pytest.mark.parametrize("true", LINKS.values(), ids=LINKS)
def test_nothing_changes_before_something_was_measured(true: LinkCost) -> None:
    link = Simulated(true)
    choice = ways(512, 512 * 256 * KIB, DEVICE)
    assert link.costs.ask(512, 512 * 256 * KIB) is None and cheapest(choice, None) is choice[0]
    assert cheapest(choice, link.costs.known(choice)) is choice[0]
    link.move(512, 256 * KIB)
    assert link.costs.known(choice).descriptor is None and link.sorts == [choice[0].sort]


def test_one_measurement_of_another_way_changes_nothing() -> None:
    """A tiny sample may be anything."""
    link = Simulated(VIRTUAL)
    choice = ways(512, 512 * 256 * KIB, DEVICE)
    for _ in range(50):
        link.costs.took(choice[0], 4e-3)
        link.costs.learn()
    straight = next(way for way in choice if not way.pieces)
    for _ in range(3):
        link.costs.took(straight, 1e-9)
        link.costs.learn()
        assert cheapest(choice, link.costs.known(choice)) is choice[0]


@settings(max_examples=100, deadline=None)
@given(
    nbytes=st.integers(MIB, 1 << 32),
    rows=st.lists(st.integers(1, 1 << 20), min_size=2, max_size=6, unique=True),
    terms=st.tuples(
        *[st.floats(0.0, 1e-2)] * 1, st.floats(0.0, 1e-3), *[st.floats(0.0, 1e-2)], *[st.floats(0.0, 1e-9)] * 3
    ),
    unknown=st.sets(st.sampled_from(["descriptor", "alone", "among"])),
    info=st.sampled_from([DEVICE, HOSTS]),
)
def test_longer_rows_never_turn_straight_into_staged(
    nbytes: int, rows: list[int], terms: tuple[float, ...], unknown: set[str], info: LinkInfo
) -> None:
    cost = msgspec.structs.replace(LinkCost(*terms), **dict.fromkeys(unknown))
    chosen = [cheapest(ways(n, nbytes, info), cost) for n in sorted(rows, reverse=True)]
    straight = [not way.pieces for way in chosen]
    assert straight == sorted(straight)


@settings(max_examples=15, deadline=None)
@given(factors=st.tuples(*[st.floats(0.1, 10.0)] * 6), seed=st.integers(0, 1 << 16))
def test_the_figures_come_to_the_true_costs(factors: tuple[float, ...], seed: int) -> None:
    """With parts of all kinds, however wrong the first guess was. What adds little to any part need not be known well."""
    first = guess(256 * KIB, False)
    true = LinkCost(*(term * factor for term, factor in zip(msgspec.structs.astuple(first), factors, strict=True)))
    dice = random.Random(seed)
    shapes = [(n, row) for n in (8, 64, 512, 4096) for row in (64 * KIB, 512 * KIB, 4 * MIB) if n * row > MIB]
    info = msgspec.structs.replace(DEVICE, stage_below=256 * KIB)
    costs = way_costs(info)
    for _ in range(800):
        rows, row = dice.choice(shapes)
        choice = ways(rows, rows * row, info)
        way = dice.choice(choice)
        costs.took(way, true.seconds(way) * math.exp(dice.gauss(0.0, 0.1)))
        costs.learn()
    for rows, row in shapes:
        choice = ways(rows, rows * row, info)
        for way in choice:
            assert costs.known(choice).seconds(way) == pytest.approx(true.seconds(way), rel=0.35)
    known = costs.known()
    assert None not in msgspec.structs.astuple(known)


def test_a_link_that_changes_is_followed() -> None:
    """Descriptors that were dear become cheap, as after a change of the host's load."""
    shapes = SHAPES["rows of 256 KiB"]
    for dice in seeds():
        link = Simulated(DEAR, dice=dice)
        link.many(shapes, 400)
        link.true = VIRTUAL
        link.many(shapes, 1500)
        assert link.many(shapes, 300)[0] < 1.25 < link.by_guess / link.least


def test_parts_that_are_held_up_do_not_turn_the_choice() -> None:
    """Contention makes some parts take long, by chance those of the better way."""
    shape = (512, 256 * KIB)
    for dice in seeds():
        link = Simulated(VIRTUAL, dice=dice)
        link.many([shape], 500)
        assert link.sorts[-50:].count(0) > 40
        choice = ways(512, 512 * 256 * KIB, DEVICE)
        straight = next(way for way in choice if not way.pieces)
        for _ in range(3):
            link.costs.took(straight, 0.1)
            link.costs.learn()
        assert cheapest(choice, link.costs.known(choice)) is straight


@pytest.mark.parametrize("true", LINKS.values(), ids=LINKS)
def test_trials_lose_little_of_the_time_and_no_part_loses_much(true: LinkCost) -> None:
    link = Simulated(true, noise=0.0, held_up=0.0)
    shapes = SHAPES["many lengths"]
    link.many(shapes, 300)
    lost = total = worst = 0.0
    for _ in range(2000):
        rows, row = link.dice.choice(shapes)
        choice = ways(rows, rows * row, DEVICE)
        usual = true.seconds(cheapest(choice, link.costs.known(choice)))
        excess = true.seconds(link.move(rows, row)) - usual
        total, lost, worst = total + usual, lost + max(excess, 0.0), max(worst, excess)
    assert lost < TRIED * total + TRIAL_S and worst < 2 * TRIAL_S


@pytest.mark.parametrize("true", LINKS.values(), ids=LINKS)
def test_no_way_is_forgotten(true: LinkCost) -> None:
    """Each way that a part may go is tried again and again, unless a part would lose too much."""
    link = Simulated(true)
    for _ in range(3):
        link.sorts.clear()
        link.many([(64, 256 * KIB), (512, 256 * KIB)], 2500)
        assert set(link.sorts) == {0, 1, 2}


def test_rows_that_leave_no_doubt_have_one_way() -> None:
    """So nothing is measured or told for them."""
    for info in (DEVICE, HOSTS):
        short, long = info.stage_below // IN_DOUBT // 2, info.stage_below * IN_DOUBT
        assert all(way.pieces for way in ways(1000, 1000 * short, info))
        assert [way.pieces for way in ways(10, 10 * long, info)] == [0]
    always = msgspec.structs.replace(DEVICE, stage_below=1 << 48)
    assert all(way.pieces for way in ways(1, 1 << 32, always))
    never = msgspec.structs.replace(DEVICE, stage_below=0)
    assert [way.pieces for way in ways(1 << 20, 1 << 20, never)] == [0]


def test_costs_for_a_trial_make_that_way_the_cheapest() -> None:
    choice = ways(400, 400 * 128 * KIB, DEVICE)
    assert {way.sort for way in choice} == {0, 1, 2}
    for sort, cost in enumerate(TRIALS):
        assert cheapest(choice, cost).sort == sort


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 1e9])
def test_a_peer_can_tell_no_nonsense(bad: float) -> None:
    for term in range(6):
        told = [1e-6] * 6
        told[term] = bad
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=LinkCost)
