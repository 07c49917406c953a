"""P and D beside a store that loads, inside `MultiConnector`: tokens are right in either order, and it is told who has brought the KV."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig

from tests.engine.direct import Switchboard
from tests.vllm.cases import check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import PlayedEngine, prompt
from tests.vllm.store import attach
from tests.vllm.test_multi import OURS, crossed
from tests.vllm.wire import Wire

overlap = both_ways
TURNS = 4


def config(ours_first: bool, later: bool, **extra: Any) -> KVTransferConfig:
    ours = {**OURS, "kv_connector_extra_config": extra}
    store = {
        "kv_connector": "Store",
        "kv_connector_module_path": "tests.vllm.store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"load_async": later},
    }
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [ours, store] if ours_first else [store, ours]},
    )


def ours(d: PlayedEngine, of: str) -> list[Any]:
    return [one for stats in crossed(d) for one in stats.get("KVXferConnector", {}).get(of, ())]


def outcomes(d: PlayedEngine) -> list[str]:
    return [outcome for outcome, _ in ours(d, "requests")]


def moved(d: PlayedEngine) -> int:
    """For how many loads KV has come from P."""
    return sum(load[0] == "delivered" for load in ours(d, "loads"))


def forget(d: PlayedEngine) -> None:
    """What a full cache forgets; the store does not."""
    d.steps(6)
    assert d.scheduler.reset_prefix_cache()


@pytest.fixture(params=[False, True], ids=["in step", "beside"])
def later(request: Any) -> Any:
    return request.param


def pair(make: Make, ours_first: bool, later: bool) -> tuple[PlayedEngine, PlayedEngine]:
    p, d = (make(transfer=config(ours_first, later)) for _ in range(2))
    attach(p), attach(d)
    return p, d


@pytest.mark.parametrize("ours_first", [True, False], ids=["kvxfer first", "store first"])
def test_either_brings_what_it_has(make: Make, ours_first: bool, later: bool) -> None:
    """Prompts new to both, then prompts that the store has, by P again and without it."""
    p, d = pair(make, ours_first, later)
    texts = [prompt(40 + 7 * i, seed=i) for i in range(TURNS)]
    for text in texts:
        name = decode(d, text, prefill(p, text), p)
        assert d.computed[name] == 1 + 3
    assert outcomes(d) == ["delivered"] * TURNS
    forget(d)
    forget(p)
    before = moved(d)
    for text in texts:
        decode(d, text, prefill(p, text), p)
    again = outcomes(d)[TURNS:]
    assert again == (["delivered"] if ours_first else ["elsewhere"]) * TURNS
    assert moved(d) - before == (TURNS if ours_first else 0), "KV was moved in vain"
    forget(d)
    for text in texts:
        name = d.add(text)
        d.run(p, until=name)
        check(d, name, text)
        assert d.computed[name] <= 16 + 3, "the store has brought all whole blocks"
    assert len(outcomes(d)) == 2 * TURNS


@pytest.mark.parametrize("ours_first", [True, False], ids=["kvxfer first", "store first"])
def test_all_at_once(make: Make, ours_first: bool, later: bool) -> None:
    """Loads of both kinds in the same steps, with aborts between them."""
    p, d = pair(make, ours_first, later)
    shared = prompt(48, seed=9)
    texts = [shared + prompt(20 + 5 * i, seed=20 + i) for i in range(6)]
    decode(d, texts[0], prefill(p, texts[0]), p)
    forget(d)
    params = [prefill(p, text) for text in texts]
    names = [d.add(text, said) for text, said in zip(texts, params, strict=True)]
    d.steps(1)
    d.abort(names[3])
    d.run(p)
    for i, name in enumerate(names):
        if i != 3:
            check(d, name, texts[i])


@pytest.mark.parametrize("ours_first", [True, False], ids=["kvxfer first", "store first"])
def test_nothing_is_fetched_ahead_in_vain(make: Make, wire: Wire, ours_first: bool, later: bool) -> None:
    """Short loads are fetched before vLLM says whom it loads from, so only where nobody is asked before kvxfer."""
    board = Switchboard(waited=wire.pump)
    p, d = (
        make(transfer=config(ours_first, later)),
        make(transfer=config(ours_first, later, step_budget=1), board=board),
    )
    attach(p), attach(d)
    text = prompt(60)
    decode(d, text, prefill(p, text), p)
    forget(d)
    before = moved(d)
    decode(d, text, prefill(p, text), p)
    d.steps(4)
    assert moved(d) - before == int(ours_first)
    assert outcomes(d) == ["delivered", "delivered" if ours_first else "elsewhere"]


def test_whoever_is_asked_before_is_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(transfer=config(True, False))
    assert "Put kvxfer first" not in caplog.text
    make(transfer=config(False, False))
    assert "MultiConnector asks Store before kvxfer" in caplog.text
