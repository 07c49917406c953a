"""What a library engine, on agents and a directory alone, tells `kvxfer why`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from kvxfer import BlockTable, Fetch, Offer, TransferId
from kvxfer.cli.main import build
from kvxfer.control import stories
from kvxfer.control.stories import AgentStories
from kvxfer.failures import DELIVERED, Failure, FailureKind, Outcome
from kvxfer.identity import Source
from kvxfer.protocol.messages import Explain, Story
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing.clock import SetForward
from kvxfer.testing.engine import AgentEngine, until
from kvxfer.testing.engine.memory import PagedMemory

TOKENS = 16
DIGEST = b"prompt"


@pytest.fixture
def pair(clock: SetForward) -> Iterator[tuple[AgentEngine, AgentEngine]]:
    times = {"start_timeout": 10.0, "peer_timeout": 20.0}
    with (
        closing(AgentEngine(times, PagedMemory(tokens=TOKENS), name="p")) as p,
        closing(AgentEngine(times, PagedMemory(tokens=TOKENS), name="d")) as d,
    ):
        yield p, d


def at(engine: AgentEngine) -> str:
    return f"{engine.source.host}:{engine.source.port}"


def why(*words: str, **asked: AgentEngine) -> tuple[int, dict[str, Any]]:
    options = [word for name, engine in asked.items() for word in (f"--{name}", at(engine))]
    ran = CliRunner().invoke(build(), ["why", *words, *options, "--json"])
    return ran.exit_code, json.loads(ran.output)


def offer(p: AgentEngine, name: str, tokens: int = TOKENS, **more: Any) -> TransferId:
    transfer = TransferId.mint(p.directory.epoch, name)
    p.agents[0].offer(Offer(transfer, DIGEST, 1, tokens, BlockTable.of([[1]]), True, **more))
    return transfer


def fetch(d: AgentEngine, handle: str, transfer: TransferId, source: Source) -> None:
    d.agents[0].fetch(Fetch(handle, transfer, DIGEST, source, BlockTable.of([[2]]), 0, TOKENS))


def test_a_delivery_is_one_story_of_both_sides(pair: tuple[AgentEngine, AgentEngine]) -> None:
    p, d = pair
    fetch(d, "request-7", offer(p, "r7", handle="prefill-7"), p.source)
    assert d.over("request-7").outcome.delivered
    p.wait(Released)
    code, told = why("request-7", decode=d)
    (found,) = told["requests"]
    assert code == 0 and not told["errors"] and "it was delivered in" in found["verdict"]["says"]
    assert found["decode"]["key"] == found["prefill"]["key"] and found["decode"]["peer"] == at(p)
    assert found["prefill"]["request"] == "prefill-7"
    assert found["decode"]["came"] == found["prefill"]["came"] > 0
    assert {"began", "asked", "announced", "arrived", "ended"} <= found["decode"]["stages"].keys()
    assert {"begun", "computed", "ended"} == found["prefill"]["stages"].keys()


def test_what_failed_is_told_without_a_name(pair: tuple[AgentEngine, AgentEngine], clock: SetForward) -> None:
    p, d = pair
    never = TransferId.mint(p.directory.epoch, "never")
    fetch(d, "lost", never, p.source)
    until(lambda: p.agents[0]._runtime.producer.awaited(never))
    clock.forward(11.0)
    d.agents[0]._loop.do(lambda now: [])  # it looks at the clock
    d.over("lost")
    code, told = why(decode=d)
    (found,) = told["requests"]
    assert code == 1 and found["decode"]["request"] == "lost" and found["decode"]["outcome"] == "never_offered"
    assert "nothing came within 10 s" in found["verdict"]["says"]


def test_ranks_of_one_process_tell_one_story() -> None:
    with closing(AgentEngine(None, PagedMemory(ranks=2, tokens=TOKENS))) as p:
        for agent in p.agents:
            agent.offer(Offer(TransferId.mint(p.directory.epoch, "x"), DIGEST, 1, TOKENS, BlockTable.of([[1]]), True))
        until(lambda: why("x", prefill=p)[1]["requests"])
        code, told = why("x", prefill=p)
        assert code == 1, "nobody that was asked has fetched it"
        (found,) = told["requests"]
        assert found["prefill"]["request"].endswith("x#0") and not found["prefill"]["over"]


def test_an_engine_whose_agents_are_elsewhere_says_that_it_keeps_none() -> None:
    with closing(AgentEngine(name="p")) as p:
        p.directory.publish(())
        code, told = why("x", decode=p)
    assert code == 3 and "keeps no stories" in told["errors"][0]


def test_no_more_is_kept_than_a_bound() -> None:
    kept, source = AgentStories(7), Source("h", 1, 1)
    for n in range(3 * stories.KEPT):
        transfer = TransferId("own/1/r", n)
        kept.fetched(Fetch(f"r{n}", transfer, DIGEST, source, BlockTable.of([[2]]), 0, TOKENS), 1.0)
        kept.offered(Offer(transfer, DIGEST, 1, TOKENS, BlockTable.of([[1]]), True), 1.0)
        failure = Failure(FailureKind.PEER_LOST, "gone") if n % 2 else None
        kept.ended(Ended("consumer", transfer, f"r{n}", Outcome(failure) if failure else DELIVERED, 0, 0.0))
        kept.forget(transfer)
    assert not kept._live and len(kept._closed.good) == len(kept._closed.bad) == stories.KEPT
    assert len(kept.tell(Explain())) == stories.KEPT


@pytest.mark.parametrize("failure", [None, Failure(FailureKind.PEER_LOST, "gone")], ids=["delivered", "failed"])
def test_what_ends_while_it_is_read_is_under_way_or_over(failure: Failure | None) -> None:
    """Another thread reads it whenever the clock is looked at for its end."""
    kept, transfer, told, now = AgentStories(7), TransferId("own/1/r", 0), list[list[Story]](), stories.clock.now
    kept.fetched(Fetch("r", transfer, DIGEST, Source("h", 1, 1), BlockTable.of([[2]]), 0, TOKENS), 1.0)

    def read() -> float:
        with mock.patch("kvxfer.control.stories.clock.now", now):
            told.append(kept.tell(Explain("r")))
        return now()

    with mock.patch("kvxfer.control.stories.clock.now", read):
        kept.ended(Ended("consumer", transfer, "r", Outcome(failure) if failure else DELIVERED, 0, 0.0))
    told.append(kept.tell(Explain("r")))
    over = str(failure.kind) if failure else "delivered", bool(failure)
    assert [(one.outcome, bool(one.text)) for (one,) in told] == [("fetching", False), over]
