"""Where somebody waits for some layers, they are offered while the others are computed: by vLLM's own hooks around attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.model_executor.layers.attention import kv_transfer_utils

from kvxfer.geometry import Cache, Region, View
from kvxfer.identity import TransferId
from kvxfer.values import Group, Offer
from tests.vllm import engine as played
from tests.vllm.cases import both
from tests.vllm.conftest import Make
from tests.vllm.engine import BLOCK, FULL, HYBRID, PlayedEngine, prompt
from tests.vllm.wire import Agent

LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(10))
N = 3 * BLOCK + 5


@dataclass(eq=False)
class Slow(Agent):
    """An agent that somebody reads from over a slow link."""

    told: list[Offer] = field(default_factory=list)
    wanted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = tuple(Group(BLOCK, "window" if g.window else "full", g.window) for g in self.engine.groups)
        view = View("kv", 0, LAYERS, tuple(4096 * i for i in range(len(LAYERS))), 2, 2048, 16, "e", None, 16)
        self.cache = Cache((Region(4096, 1 << 20),), groups, (view,), self.rank)

    def banded(self, transfer: TransferId, tokens: int) -> bool:
        return self.wanted and tokens == N

    def offer(self, offer: Offer, after: Any = None) -> None:
        assert after is not None
        self.told.append(offer)
        if not offer.bands:
            super().offer(offer, after)


@pytest.fixture
def p(make: Make, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PlayedEngine:
    """An engine of layers, each of which is computed inside vLLM's hooks; before that, nothing of it is offered."""
    monkeypatch.setattr(played, "Agent", Slow)
    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "_resolve_layer_name", lambda name: name)
    context = "vllm.model_executor.layers.attention.attention.get_attention_context"
    monkeypatch.setattr(context, lambda name: ({}, None, None, None))
    forward = PlayedEngine._forward

    def by_layer(self: PlayedEngine, output: Any) -> list[list[int]]:
        tokens = forward(self, output)
        for worker, agent in zip(self.workers, self.agents, strict=True):
            monkeypatch.setattr(kv_transfer_utils, "get_kv_transfer_group", lambda worker=worker: worker)

            @kv_transfer_utils.maybe_transfer_kv_layer
            def attention(layer_name: str, agent: Any = agent) -> None:
                first = (*LAYERS, layer_name).index(layer_name)
                assert all(10 * offer.bands // 8 <= first for offer in agent.told if offer.tokens == N and offer.bands)

            for name in (*LAYERS, "draft.layers.0.attn") if output.num_scheduled_tokens else ():
                attention(name)
        return tokens

    monkeypatch.setattr(PlayedEngine, "_forward", by_layer)
    return make(getattr(request, "param", FULL), budget=128, ranks=2)


@pytest.mark.parametrize("p", [FULL, HYBRID], ids=["full", "hybrid"], indirect=True)
def test_bands_are_offered_as_their_layers_are_computed_and_then_all(p: PlayedEngine) -> None:
    to_p, _ = both(p, "job")
    p.run(until=p.add(prompt(N), to_p, n=1))
    for agent in p.agents:
        offered = [(offer.bands, offer.tokens, offer.final) for offer in agent.told]
        assert offered[:8] == [*((band, N, False) for band in range(1, 8)), (0, N, True)]
        assert len({offer.blocks[0].tobytes() for offer in agent.told}) == 1
    p.lease_ends()


def test_nothing_is_offered_by_band_where_nobody_waits_or_a_step_is_computed_in_halves(p: PlayedEngine) -> None:
    to_p, _ = both(p, "first")
    for agent in p.agents:
        agent.wanted = False  # type: ignore[attr-defined]
    p.run(until=p.add(prompt(N), to_p, n=1))
    for agent, worker in zip(p.agents, p.workers, strict=True):
        agent.wanted = True  # type: ignore[attr-defined]
        worker._work._halved = True
    to_p, _ = both(p, "second")
    p.run(until=p.add(prompt(N, 3), to_p, n=1))
    assert all(offer.bands == 0 for agent in p.agents for offer in agent.told)
    assert ParallelConfig(enable_dbo=True, all2all_backend="deepep_low_latency").use_ubatching
    p.lease_ends()
