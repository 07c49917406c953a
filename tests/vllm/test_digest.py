"""What the KV of a prompt depends on besides its tokens: a consumer whose request differs in that never takes it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.renderers.base import BaseRenderer
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.vllm.cases import OFFER
from tests.vllm.conftest import Make
from tests.vllm.engine import Engine, prompt


def lora(name: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(lora_name=name, lora_int_id=1, lora_path="/nowhere")}


def image(content: str, offset: int = 8) -> dict[str, Any]:
    where = PlaceholderRange(offset=offset, length=16)
    return {"mm_features": [MultiModalFeatureSpec(data=None, modality="image", identifier=content, mm_position=where)]}


def embeds(seed: int, mask: int | None = None, n: int = 60) -> dict[str, Any]:
    values = torch.full((n, 8), float(seed), dtype=torch.bfloat16)
    if mask is None:
        return {"tokens": None, "prompt_embeds": values}
    return {"prompt_embeds": values, "prompt_is_token_ids": [i < mask for i in range(n)]}


CASES = [
    ({}, {"tokens": prompt(60, seed=1)}),
    ({}, {"tokens": [*prompt(59), 3]}),
    ({}, lora("a")),
    (lora("a"), lora("b")),
    ({}, {"cache_salt": "s"}),
    ({"cache_salt": "s"}, {"cache_salt": "t"}),
    (image("cat"), image("dog")),
    (image("cat"), image("cat", offset=9)),
    (image("cat"), {}),
    (embeds(1), embeds(2)),
    (embeds(1), {}),
    (embeds(1, mask=20), embeds(1, mask=30)),
    (embeds(1, mask=20), embeds(2, mask=20)),
]


def engine(make: Make, **more: Any) -> Engine:
    """One that takes images: what their encoder makes of them is of no matter here."""
    e = make(**more)
    e.scheduler.max_num_encoder_input_tokens = 1000
    e.scheduler.encoder_cache_manager = EncoderCacheManager(1000)
    return e


def ask(e: Engine, params: dict[str, Any], n: int, request: dict[str, Any]) -> str:
    return e.add(request.get("tokens", prompt(60)), params, n=n, **{k: v for k, v in request.items() if k != "tokens"})


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


@pytest.mark.parametrize("request_", [{}, lora("a"), {"cache_salt": "s"}, image("cat"), embeds(1), embeds(1, mask=20)])
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
    (image("cat"), image("cat"), True),
    (image("cat"), image("dog"), False),
    ({}, image("cat", offset=60), True),
    ({}, image("cat", offset=70), True),
    ({}, image("cat", offset=59), False),
    ({}, image("cat", offset=50), False),
    (image("cat", offset=44), image("cat", offset=44), True),
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
def test_images_that_vllm_counts_take_no_part(
    make: Make, caplog: pytest.LogCaptureFixture, caching: bool, media_cache: float
) -> None:
    """With no cache that needs their content, two images have one name, on two engines that have just started."""
    counted = "renderer0-mm-1" in named_by_vllm(caching, media_cache)
    assert counted == (not caching and not media_cache)
    p, d = (engine(make, caching=caching, media_cache=media_cache) for _ in range(2))
    same = image("renderer0-mm-1-image-0")
    with caplog.at_level(logging.WARNING):
        a = ask(p, OFFER, 1, same)
        p.run(until=a)
    params = p.done[a].params
    assert (params is None) == counted
    assert ("--mm-processor-cache-gb" in caplog.text) == counted
    text = engine(make, caching=caching, media_cache=media_cache)
    b = ask(text, OFFER, 1, {})  # a request without images is served as ever
    text.run(until=b)
    assert text.done[b].params is not None
    text.lease_ends()
    if params is None:
        c = ask(d, {**text.done[b].params, "do_remote_prefill": True}, 4, same)
        d.run(p, text, until=c)
        assert d.computed[c] == 60 + 3, "D took what may be of another image"
    else:
        p.lease_ends()
