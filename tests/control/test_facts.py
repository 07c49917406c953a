"""What two engines' KV depends on is compared at first contact, by both of them, and again whenever it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count

import pytest

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.errors import ConfigError, PeerError
from kvxfer.facts import MAX_FACTS, MAX_NAME, MAX_TEXT, sealed
from kvxfer.failures import FailureKind, Outcome
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from tests.control.conftest import SeededEngine, engine, fetch, offered

__all__ = ["engine"]

OURS = {"weights": "a3f1", "dtype": "bfloat16"}
THEIRS = {"weights": "77c0", "dtype": "bfloat16"}

Make = Callable[..., SeededEngine]

_names = (f"t{n}" for n in count())


def deliver(p: SeededEngine, d: SeededEngine) -> Outcome:
    """One transfer from ``p`` to ``d``, and how it ended there."""
    t = TransferId(next(_names), 0)
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=t, handle=t.base))
    p.agents[0].offer(offered([3, 1], 8, transfer=t))
    return d.over(t.base, 20.0).outcome


def test_a_consumer_refuses_by_the_card(engine: Make) -> None:  # noqa: F811
    p, d = engine({}, seed=1, facts=THEIRS), engine({}, facts=OURS)
    end = deliver(p, d)
    assert end.kind is FailureKind.INCOMPATIBLE
    assert end.failure.peer == f"engine 'engine0' at {p.source}"
    assert "weights: a3f1 here, 77c0 at the producer" in end.failure.detail and "'model'" in end.failure.advice
    assert "dtype" not in end.failure.detail, "it names what differs, and nothing else"
    assert not d.block(5).any() and not d.block(2).any()


@pytest.mark.parametrize("silent", ["producer", "consumer"])
def test_who_states_nothing_serves_nobody_who_does(engine: Make, silent: str) -> None:  # noqa: F811
    p = engine({}, seed=1, facts=None if silent == "producer" else OURS)
    d = engine({}, facts=None if silent == "consumer" else OURS)
    where = "not stated at the producer" if silent == "producer" else "not stated here"
    assert where in deliver(p, d).failure.detail


def test_a_producer_refuses_by_the_hello(engine: Make, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    """Its directory has said the same as the consumer, and was wrong by the time of the hello."""
    p, d = engine({}, seed=1, facts=THEIRS), engine({}, facts=OURS)
    p.directory.identify(OURS)
    with caplog.at_level(logging.WARNING):
        end = deliver(p, d)
    assert "weights: 77c0 here, a3f1 at the consumer" in end.failure.detail and "'engine1'" in end.failure.detail
    assert "refused a link from 'engine1'" in caplog.text


@pytest.mark.parametrize("changes", ["producer", "consumer"])
def test_facts_that_change_while_engines_are_linked(engine: Make, changes: str) -> None:  # noqa: F811
    p, d = engine({}, seed=1, facts=OURS), engine({}, facts=OURS)
    assert deliver(p, d).delivered
    first, second = (p, d) if changes == "producer" else (d, p)

    def change(e: SeededEngine) -> None:
        e.directory.identify(THEIRS)
        e.agents[0].identify(THEIRS)

    change(first)
    words = ("a3f1 here, 77c0 at the producer", "77c0 here, a3f1 at the consumer")
    if changes == "consumer":
        words = ("77c0 here, a3f1 at the producer",) * 2
    end = deliver(p, d)
    assert end.kind is FailureKind.INCOMPATIBLE and any(f"weights: {w}" in end.failure.detail for w in words), end
    change(second)
    assert deliver(p, d).delivered


def test_a_fetch_under_way_does_not_survive_a_change(engine: Make) -> None:  # noqa: F811
    p, d = engine({}, seed=1, facts=OURS), engine({}, facts=OURS)
    t = TransferId("waits", 0)
    assert deliver(p, d).delivered
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=t, handle="waits"))
    d.agents[0].identify(THEIRS)
    end = d.over("waits").outcome
    assert end.kind is FailureKind.INCOMPATIBLE


def test_an_agent_that_has_not_been_told_takes_its_directory_s_word(engine: Make) -> None:  # noqa: F811
    """The engine tells its agents with its first step, and links may come before; they are judged then."""
    p, d = engine({}, seed=1), engine({}, facts=OURS)
    p.directory.identify(OURS)
    assert deliver(p, d).delivered
    p.agents[0].identify(OURS)
    assert deliver(p, d).delivered, "nothing has changed"
    p.agents[0].identify(THEIRS)
    assert "weights: 77c0 here, a3f1 at the consumer" in deliver(p, d).failure.detail


@pytest.mark.parametrize(
    "facts",
    [
        {str(n): "" for n in range(MAX_FACTS + 1)},
        {"": "x"},
        {"n" * (MAX_NAME + 1): "x"},
        {"n": "x" * (MAX_TEXT + 1)},
        {"n": "a\nb"},
    ],
    ids=["many", "no name", "long name", "long text", "two lines"],
)
def test_facts_have_bounds(engine: Make, facts: dict[str, str]) -> None:  # noqa: F811
    e = engine({})
    for state in (e.directory.identify, e.agents[0].identify, lambda f: Directory(Config(), "e", f)):
        with pytest.raises(ConfigError, match="fact"):
            state(facts)


@pytest.mark.parametrize(
    "facts", [{str(n): "" for n in range(MAX_FACTS + 1)}, {"n" * (MAX_NAME + 1): "x"}, {"n": "x" * (MAX_TEXT + 1)}]
)
def test_peers_are_held_to_them(facts: dict[str, str]) -> None:
    with pytest.raises(PeerError):
        m.decode(m.encode(m.EngineDescriptor(m.PROTOCOL, "e", 1, (), facts)))


def test_the_seal() -> None:
    assert sealed({"a": "1", "b": "2"}) == sealed({"b": "2", "a": "1"})
    assert len({sealed(f) for f in ({}, {"a": "1"}, {"a": "2"}, {"b": "1"}, {"a": "1", "b": "1"}, {"a1": ""})}) == 6
