"""What the KV of a prompt depends on besides its tokens: a consumer whose request differs in that never takes it."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import ModelConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.pooling_params import PoolingParams
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from kvxfer_vllm.content import Beside, media
from tests.vllm.cases import OFFER, check, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import PlayedEngine, ours, prompt


def lora(content: str, name: str = "a", path: str = "/nowhere") -> dict[str, Any]:
    """A request with an adapter that has been loaded with these weights."""
    return {"lora_request": LoRARequest(lora_name=name, lora_int_id=1, lora_path=path), "weights": content}


def field(value: Any) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=value, field=MultiModalBatchedField())


def pixels(seed: int, dtype: torch.dtype = torch.float32) -> MultiModalKwargsItem:
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 16, 16)))
    return MultiModalKwargsItem({"pixel_values": field(values.to(dtype)), "sizes": field(torch.tensor([16, 16]))})


def image(seed: int, offset: int = 8, name: str | None = None, modality: str = "image", **more: Any) -> dict[str, Any]:
    """A request with an image, of which the processor has made these pixels; vLLM's name for it holds the model's path."""
    where = PlaceholderRange(offset=offset, length=16)
    data = more.get("data", pixels(seed))
    names = f"{next(_paths)}-{seed}" if name is None else name
    return {"mm_features": [MultiModalFeatureSpec(data=data, modality=modality, identifier=names, mm_position=where)]}


_paths = itertools.count()


def embeds(seed: int, mask: int | None = None, n: int = 60) -> dict[str, Any]:
    values = torch.full((n, 8), float(seed), dtype=torch.bfloat16)
    if mask is None:
        return {"tokens": None, "prompt_embeds": values}
    return {"prompt_embeds": values, "prompt_is_token_ids": [i < mask for i in range(n)]}


CASES = [
    ({}, {"tokens": prompt(60, seed=1)}),
    ({}, {"tokens": [*prompt(59), 3]}),
    ({}, lora("x")),
    (lora("x"), lora("y")),
    (lora("x"), lora("y", "b", "/elsewhere")),
    ({}, {"cache_salt": "s"}),
    ({"cache_salt": "s"}, {"cache_salt": "t"}),
    (image(1), image(2)),
    (image(1), image(1, offset=9)),
    (image(1), {}),
    (image(1), image(1, modality="video")),
    (image(1), image(1, data=pixels(1, torch.float64))),
    (image(1, name="uuid"), image(2, name="uuid")),
    (embeds(1), embeds(2)),
    (embeds(1), {}),
    (embeds(1, mask=20), embeds(1, mask=30)),
    (embeds(1, mask=20), embeds(2, mask=20)),
]


def engine(make: Make, **more: Any) -> PlayedEngine:
    """One that takes images: what their encoder makes of them is of no matter here."""
    e = make(**more)
    e.scheduler.max_num_encoder_input_tokens = 1000
    e.scheduler.encoder_cache_manager = EncoderCacheManager(1000)
    return e


def ask(e: PlayedEngine, params: dict[str, Any], n: int, request: dict[str, Any]) -> str:
    if "weights" in request:
        e.load_adapter(request["lora_request"].lora_int_id, request["weights"])
    more = {k: v for k, v in request.items() if k not in ("tokens", "weights")}
    return e.add(request.get("tokens", prompt(60)), params, n=n, **more)


@pytest.mark.parametrize(("there", "here"), CASES)
def test_requests_that_differ(make: Make, there: dict[str, Any], here: dict[str, Any]) -> None:
    p, d = engine(make), engine(make)
    a = ask(p, OFFER, 1, there)
    p.run(until=a)
    params = p.done[a].params
    assert params is not None
    b = ask(d, params, 4, here)
    d.run(p, until=b)
    assert d.computed[b] == 60 + 3, "D took what was computed for another request"
    p.lease_ends()


@pytest.mark.parametrize("request_", [{}, {"cache_salt": "s"}, image(1), embeds(1), embeds(1, mask=20)])
def test_requests_that_are_the_same(make: Make, request_: dict[str, Any]) -> None:
    p, d = engine(make), engine(make)
    a = ask(p, OFFER, 1, request_)
    p.run(until=a)
    params = p.done[a].params
    assert params is not None
    b = ask(d, params, 4, request_)
    d.run(p, until=b)
    assert d.computed[b] == 1 + 3


LONGER = [
    ({}, {}, True),
    (lora("a"), lora("a"), True),
    (lora("a"), lora("b"), False),
    ({}, {"cache_salt": "s"}, False),
    (image(1), image(1), True),
    (image(1), image(2), False),
    ({}, image(1, offset=60), True),
    ({}, image(1, offset=70), True),
    ({}, image(1, offset=59), False),
    ({}, image(1, offset=50), False),
    (image(1, offset=44), image(1, offset=44), True),
    (embeds(1), embeds(1, n=100), True),
    (embeds(2), embeds(1, n=100), False),
    (embeds(1, mask=20), embeds(1, mask=20, n=100), True),
    (embeds(1, mask=20), embeds(1, mask=30, n=100), False),
    (embeds(1, mask=60), embeds(1, mask=80, n=100), True),
]
"""What P and D are asked, and whether what D is asked begins with the other. Media may begin behind that, and not end behind it."""


@pytest.mark.parametrize(("there", "here", "same"), LONGER)
def test_requests_that_go_on(make: Make, there: dict[str, Any], here: dict[str, Any], same: bool) -> None:
    p, d = engine(make, policy="fail"), engine(make, policy="fail", budget=128)
    a = ask(p, OFFER, 1, there)
    p.run(until=a)
    params = p.done[a].params
    assert params is not None
    b = ask(d, params, 4, {"tokens": prompt(100), **here})
    d.run(p, until=b)
    assert len(d.done[b].tokens) == 4
    assert d.computed[b] == (40 if same else 100) + 3


def named_by_vllm(caching: bool, media_cache: float) -> str:
    """What vLLM's own front end calls the first image that it sees."""
    images = SimpleNamespace(
        get_all_counts=lambda: {"image": 1}, values=lambda: [], items=lambda: [], get=lambda *_: None, keys=lambda: []
    )
    renderer = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=media_cache)),
        config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching)),
        _validate_mm_uuids=lambda *_: None,
    )
    found = BaseRenderer._process_mm_uuids(renderer, {}, images, {}, "renderer0-mm-1")
    return str(found.get("image"))


@pytest.mark.parametrize(("caching", "media_cache"), [(False, 0.0), (True, 0.0), (False, 4.0)])
def test_images_are_known_by_content_whatever_vllm_calls_them(make: Make, caching: bool, media_cache: float) -> None:
    """With no cache that needs their content, vLLM counts: two images have one name, on two engines that have just started."""
    counted = "renderer0-mm-1" in named_by_vllm(caching, media_cache)
    assert counted == (not caching and not media_cache)
    p, d = (engine(make, caching=caching, media_cache=media_cache) for _ in range(2))
    name = "renderer0-mm-1-image-0"
    assert computed(p, d, image(1, name=name), image(2, name=name)) == 60 + 3, "D took what is of another image"
    again = f"{name}-again"
    assert computed(p, d, image(3, name=again), image(3, name=again), seed=1) == 1 + 3


def computed(p: PlayedEngine, d: PlayedEngine, there: dict[str, Any], here: dict[str, Any], seed: int = 0) -> int:
    """How many tokens D computes of a request and its answer, once P has prefilled one."""
    text = prompt(60, seed=seed)
    a = ask(p, OFFER, 1, {"tokens": text, **there})
    p.run(until=a)
    b = ask(d, p.done[a].params or {}, 4, {"tokens": text, **here})
    d.run(p, until=b)
    p.lease_ends()
    return d.computed[b]


# --- media ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"data": None}, "is not in the request"),
        ({"data": MultiModalKwargsItem({"image_grid_thw": field(torch.tensor([[1, 4, 4]]))})}, "is not in the request"),
        ({"data": MultiModalKwargsItem({"second_per_grid_ts": field(torch.tensor([0.5]))})}, "is not in the request"),
        ({"data": MultiModalKwargsItem({"address": field(7)})}, "--mm-processor-cache-type lru"),
    ],
)
def test_media_that_the_scheduler_cannot_see_are_not_moved(
    make: Make, caplog: pytest.LogCaptureFixture, more: dict[str, Any], why: str
) -> None:
    p = engine(make)
    with caplog.at_level(logging.WARNING):
        a = ask(p, OFFER, 1, image(1, name="a name", **more))
        p.run(until=a)
    assert p.done[a].params is None and why in caplog.text


def test_a_name_that_two_images_have_had_is_not_trusted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's caches of blocks and of what encoders made would take the one for the other."""
    p = engine(make)
    with caplog.at_level(logging.WARNING):
        names = [ask(p, OFFER, 1, image(1, name="uuid")) for _ in range(2)]
        p.run(until=names[-1])
        names.append(ask(p, OFFER, 1, image(2, name="uuid")))
        p.run(until=names[-1])
    assert [p.done[name].params is None for name in names] == [False, False, True]
    assert "uuid of its own" in caplog.text
    p.lease_ends()


def test_nor_is_it_trusted_for_the_first_of_them_again(make: Make) -> None:
    """What vLLM has cached under the name may be that of the second by now."""
    p = engine(make)
    for seed, told in ((1, True), (2, False), (1, False)):
        name = ask(p, OFFER, 1, {**image(seed, name="uuid"), "tokens": prompt(60, seed=seed)})
        p.run(until=name)
        assert (p.done[name].params is not None) == told
        p.lease_ends()
        p.scheduler.reset_prefix_cache()
    first = ask(p, OFFER, 1, image(1, name="another"))
    p.run(until=first)
    assert p.done[first].params is not None
    p.lease_ends()


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"video_pruning_rate": 0.5},
        {"mm_device_do_normalize": False},
        {"mm_encoder_attn_dtype": "fp8"},
    ],
)
def test_how_media_are_processed_counts_for_requests_with_media(make: Make, settings: dict[str, Any]) -> None:
    p, d = engine(make, media=settings), engine(make)
    assert computed(p, d, image(1), image(1)) == 60 + 3
    assert computed(p, d, {}, {}, seed=1) == 1 + 3


PRUNED = {"media": {"video_pruning_rate": 0.6}}
VIDEO = image(1, modality="video")


@pytest.fixture
def mrope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "uses_mrope", True)


@pytest.mark.usefixtures("mrope")
def test_behind_a_pruned_video_nothing_is_moved(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The tower makes the positions of all that follows, and a decode engine that loads runs no tower."""
    p, d, other = (engine(make, **PRUNED) for _ in range(3))
    with caplog.at_level(logging.WARNING):
        name = ask(p, OFFER, 1, VIDEO)
        p.run(until=name)
    assert p.done[name].params is None and "--video-pruning-rate" in caplog.text
    here = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": p.address.host, "remote_port": p.address.port}
    for said in (here, {"kvxfer_sources": [str(p.address)]}):
        name = ask(d, said, 4, {**VIDEO, "tokens": [*prompt(60), 5]})
        d.run(p, until=name)
        assert d.computed[name] == 61 + 3 and not d.loaded
        d.scheduler.reset_prefix_cache()
    assert sum(stats["not_loaded"].get("state", 0) for stats in d.stats) == 1
    assert not p.address == other.address
    assert computed(p, other, image(1), image(1), seed=1) == 1 + 3, "the positions of images follow from the request"


def test_log_probabilities_of_a_prompt_are_those_of_whoever_computes_it(make: Make) -> None:
    p, d = engine(make), engine(make)
    text = prompt(60)
    params, sampling = prefill(p, text), SamplingParams(max_tokens=4, prompt_logprobs=1)
    sampling.extra_args = {"kv_transfer_params": params}
    request = Request("r-deadbeef", text, sampling, None, block_hasher=d.hasher)
    d.scheduler.add_request(request)
    d.run(p, until=request.request_id)
    assert not d.loaded and d.computed[request.request_id] == 60 + 3


def test_what_is_pooled_of_a_prompt_is_that_of_whoever_computes_it(make: Make) -> None:
    request = Request("r-deadbeef", prompt(60), None, PoolingParams(task="embed", skip_reading_prefix_cache=False))
    assert "pooled" in (Beside(engine(make).config).no_part(request) or "")


def test_an_engine_that_collects_hidden_states_loads_nothing(make: Make) -> None:
    p, d = engine(make), engine(make)
    ours(d.scheduler.connector)._sched._arrivals.content.beside._collects = True
    text = prompt(60)
    name = d.add(text, prefill(p, text))
    d.run(p, until=name)
    check(d, name, text)
    assert not d.loaded


def test_the_same_item_is_hashed_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    p, hashed = engine(make), []
    monkeypatch.setattr(media, "content_hash", lambda *what: hashed.append(what) or "x")
    same = pixels(1)
    names = [ask(p, OFFER, 1, image(1, name="one", data=same)) for _ in range(3)]
    p.run(until=names[-1])
    p.lease_ends()
    assert len(hashed) == 1


# --- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [lora("x"), lora("x", "b"), lora("x", path="/elsewhere")])
def test_one_adapter_under_another_name_or_path(make: Make, here: dict[str, Any]) -> None:
    assert computed(engine(make), engine(make), lora("x"), here) == 1 + 3


def test_an_adapter_that_nobody_has_loaded_moves_nothing_and_is_named_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p = engine(make)
    unknown = {"lora_request": lora("x", "surprise")["lora_request"]}
    with caplog.at_level(logging.WARNING):
        names = [ask(p, OFFER, 1, {**unknown, "tokens": prompt(60, seed=seed)}) for seed in range(3)]
        p.run(until=names[-1])
    assert all(p.done[name].params is None for name in names)
    assert caplog.text.count("'surprise'") == 1 and "/v1/load_lora_adapter" in caplog.text


def test_an_adapter_that_a_step_loads_is_known_from_then_on(make: Make) -> None:
    """As with vLLM's offline engine, whose requests name a path."""
    p, d = engine(make), engine(make)
    d.load_adapter(1, "x")
    adapter = {"lora_request": lora("x")["lora_request"]}
    a = ask(p, OFFER, 1, adapter)
    p.reread_adapter(1, "x")
    p.run(until=a)
    assert p.done[a].params is None
    assert computed(p, d, adapter, adapter, seed=1) == 1 + 3


def test_an_adapter_loaded_again_between_offer_and_load(make: Make) -> None:
    p, d = engine(make), engine(make)
    adapter = {"lora_request": lora("x")["lora_request"]}
    a = ask(p, OFFER, 1, lora("x"))
    p.run(until=a)
    d.load_adapter(1, "x")
    d.load_adapter(1, "y")
    b = ask(d, p.done[a].params or {}, 4, adapter)
    d.run(p, until=b)
    assert d.computed[b] == 60 + 3, "D took what was computed with the weights of before"
    p.lease_ends()
    p.load_adapter(1, "y")
    assert computed(p, d, adapter, adapter, seed=1) == 1 + 3


def test_an_adapter_loaded_again_while_its_request_waits(make: Make) -> None:
    p, d = engine(make), engine(make, seqs=1)
    a = ask(p, OFFER, 1, lora("x"))
    p.run(until=a)
    d.load_adapter(1, "x")
    first = d.add(prompt(30, seed=5), n=40)
    d.step()
    b = ask(d, p.done[a].params or {}, 4, {"lora_request": lora("x")["lora_request"]})  # waits behind the first
    d.step()
    d.load_adapter(1, "y")
    d.run(p, until=b)
    assert first in d.done and d.computed[b] == 60 + 3
    p.lease_ends()


def test_blocks_of_an_adapter_s_earlier_weights_are_not_taken_from_the_prefix_cache(make: Make) -> None:
    """vLLM's keys have an adapter's name and path, which stay: it says so itself when it loads one again."""
    p, d = engine(make), engine(make)
    adapter = {"lora_request": lora("x")["lora_request"]}
    for content in ("x", "y", "x"):
        p.load_adapter(1, content)
        d.load_adapter(1, content)
        a = ask(p, OFFER, 1, adapter)
        p.run(until=a)
        assert p.computed[a] == 60, "P offers what it computed with the weights of before"
        b = ask(d, p.done[a].params or {}, 4, adapter)
        d.run(p, until=b)
        assert d.computed[b] == 1 + 3
        p.lease_ends()
        c = ask(d, {}, 4, adapter)
        d.run(until=c)
        assert d.computed[c] < 60, "with the weights of now it is cached"


def test_blocks_that_no_transfer_has_cached_are_not_taken_for_those_of_other_weights(make: Make) -> None:
    p, d = engine(make), engine(make)
    adapter = {"lora_request": lora("x")["lora_request"]}
    p.load_adapter(1, "x")
    a = ask(p, {}, 4, adapter)
    p.run(until=a)
    p.load_adapter(1, "y")
    d.load_adapter(1, "y")
    b = ask(p, OFFER, 1, adapter)
    p.run(until=b)
    assert p.computed[b] == 60, "P offers what it computed with the weights of before"
    c = ask(d, p.done[b].params or {}, 4, adapter)
    d.run(p, until=c)
    assert d.computed[c] == 1 + 3
    p.lease_ends()


@pytest.mark.parametrize("asked", [False, True], ids=["reread", "loaded again"])
def test_a_prompt_computed_partly_with_other_weights_is_not_offered(make: Make, asked: bool) -> None:
    p, d = engine(make, budget=32), engine(make)
    text = prompt(100)
    a = ask(p, {**OFFER, "transfer_id": "t"}, 1, {**lora("x"), "tokens": text})
    d.load_adapter(1, "x")
    p.step()
    (p.load_adapter if asked else p.reread_adapter)(1, "y")
    where = {"remote_host": "127.0.0.1", "remote_port": p.address.port, "do_remote_prefill": True, "transfer_id": "t"}
    b = ask(d, where, 4, {"lora_request": lora("x")["lora_request"], "tokens": text})
    d.run(p, until=b)
    p.run(until=a)
    assert d.computed[b] == 100 + 3
    p.lease_ends()


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj"]}, {"enable_tower_connector_lora": True}])
def test_where_adapters_apply_counts_for_requests_with_one(make: Make, settings: dict[str, Any]) -> None:
    p, d = engine(make, adapters=settings), engine(make)
    assert computed(p, d, lora("x"), lora("x")) == 60 + 3
    assert computed(p, d, {}, {}, seed=1) == 1 + 3
