"""A load brings all of a prompt but its last token, whatever the groups, block sizes, chunks and hits; with the rules of a GPU on."""

from __future__ import annotations

import pathlib
import random
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vllm.cases import OFFER, both, check
from tests.vllm.conftest import played
from tests.vllm.engine import Group, PlayedEngine, prompt
from tests.vllm.wire import Wire

FULL, ALIGNED, STATE = Group(), Group(state=True, aligned=True), Group(state=True)
MORE = 3
"""Tokens of an answer."""


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the connector decides by the platform, it decides as on a GPU."""
    monkeypatch.setattr("kvxfer_vllm.settings._on_cuda", lambda: True)


@dataclass(frozen=True)
class Case:
    groups: tuple[Group, ...]
    blocks: tuple[int, int]  # tokens of a block at P and at D, whose blocks divide P's
    tokens: int  # of P's prompt
    chunk: int  # the most tokens of a step of P
    said: int  # what P answers: its windows move on
    had: int  # of these tokens, D has computed whole blocks before
    behind: int  # tokens that D's prompt has behind P's
    at_once: bool  # the router asks both at once
    overlap: bool  # steps are planned before the last one's result is seen
    asked: int  # then D asks P for a prompt that has this many of the tokens in common

    @property
    def exact(self) -> bool:
        """Whether P computes all tokens but the last, because the state after them is what it offers."""
        return any(group.state for group in self.groups)


def drawn(rng: random.Random) -> Case:
    """A case, evenly distributed: lengths that hypothesis draws by itself are short, and within all windows."""
    window = [Group(window=rng.randint(1, 150)), Group(window=rng.randint(1, 150)), Group(chunk=16 * rng.randint(1, 6))]
    groups = [
        *rng.choice([(), (FULL,), (FULL,)]),
        *rng.sample(window, rng.choice([0, 1, 1, 2])),
        *rng.choice([(), (), (), (ALIGNED,), (STATE,)]),
    ]
    groups = groups if any(not group.state for group in groups) else [FULL, *groups]
    exact, plain = any(group.state for group in groups), not any(group.state or group.chunk for group in groups)
    at_p, tokens, at_once = rng.choice([16, 32, 64]), rng.randint(2, 300), rng.random() < 0.4
    return Case(
        tuple(groups),
        (at_p, min(at_p, rng.choice([16, 32, 64])) if plain else at_p),
        tokens,
        rng.randint(at_p, 320),
        1 if exact else rng.choice([1, rng.randint(2, 40)]),
        rng.choice([0, rng.randint(1, tokens)]),
        0 if at_once else rng.choice([0, rng.randint(1, 40)]),
        at_once,
        rng.random() < 0.5,
        rng.choice([0, rng.randint(1, tokens)]),
    )


def computes(engine: PlayedEngine, text: list[int], params: dict[str, Any], *others: PlayedEngine, n: int) -> str:
    name = engine.add(text, params, n=n)
    engine.run(*others, until=name)
    return name


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 1 << 32))
def test_a_load_brings_all_but_the_last_token(seed: int) -> None:
    """What a consumer wants of a window, its producer has kept: no load fails, and no token is computed that need not be."""
    case = drawn(random.Random(seed))
    wire, text = Wire(), prompt(case.tokens)
    with tempfile.TemporaryDirectory() as folder, played(wire, pathlib.Path(folder), case.overlap) as make:
        p = make(case.groups, size=case.blocks[0], budget=case.chunk, blocks=160)
        d = make(case.groups, size=case.blocks[1], budget=512, blocks=160)
        if case.had:
            check(d, computes(d, text[: case.had], {}, n=1), text[: case.had], 1)
        to_p, to_d = both(p, "job") if case.at_once else (OFFER, {})
        name = p.add(text, to_p, n=case.said)
        if not case.at_once:
            p.run(until=name)
            to_d = p.done[name].params or {}
            assert to_d["do_remote_prefill"]
        whole = text + prompt(case.behind, seed=7)
        loaded = computes(d, whole, to_d, p, n=MORE)
        check(d, loaded, whole, MORE)
        left = case.behind + (case.exact or not case.behind) + MORE - 1
        assert not wire.failed, wire.failed
        # What ends with a chunk may be cached at D although it has computed less.
        assert d.computed[loaded] <= left if case.had else d.computed[loaded] == left
        if case.asked:
            other = text[: case.asked] + prompt(20, seed=9)
            asks = {"kvxfer_sources": [str(p.address)]}
            asked = computes(d, other, asks, p, n=1)
            assert case.exact or d.done[asked].tokens
            assert not wire.failed, wire.failed
