"""`generate()` goes on in another exchange with the tokens of a plain run, whatever the cache, the model and the batch."""

import gc
import time
import weakref

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvxfer import FailureKind, KvxferError
from kvxfer_transformers import CacheExchange
from kvxfer_transformers.demo.models import MODELS, WINDOW
from tests.transformers.conftest import Pair, batch, plain, prefilled


def static(model, length: int = 200) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=length)


def go_on(pair: Pair, ticket: str, prompts, cache=None, tokens: int = 7) -> list[list[int]]:
    fetched = pair.consumer.fetch(ticket, **prompts, cache=cache)
    return pair.model.generate(**fetched, max_new_tokens=tokens, do_sample=False).tolist()


def positions(prompts) -> torch.Tensor:
    """As `generate()` counts: padding does not."""
    return (prompts["attention_mask"].cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("into", ["dynamic", "static"])
@pytest.mark.parametrize("out_of", ["dynamic", "static"])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_tokens_are_those_of_a_plain_run(pairs, kind: str, out_of: str, into: str) -> None:
    """Rows longer and shorter than a window, and than a block."""
    pair = pairs(kind)
    prompts = batch(70, 3, WINDOW + 1, WINDOW - 1)
    made = prefilled(pair.model, prompts, static(pair.model) if out_of == "static" else None)
    ticket = pair.producer.offer(made.past_key_values, made.sequences, prompts["attention_mask"])
    cache = static(pair.model) if into == "static" else None
    assert go_on(pair, ticket, prompts, cache) == plain(pair.model, prompts)


@pytest.mark.parametrize("length", [2, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 31, 32, 33])
def test_a_window_that_is_not_full_or_just_is(pairs, length: int) -> None:
    pair = pairs("mixed")
    prompts = batch(length)
    made = prefilled(pair.model, prompts)
    ticket = pair.producer.offer(made.past_key_values, made.sequences)
    assert go_on(pair, ticket, prompts) == plain(pair.model, prompts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["full", "latent"])
def test_other_dtypes(pairs, kind: str, dtype: torch.dtype) -> None:
    pair = pairs(kind, dtype)
    prompts = batch(40, 17)
    made = prefilled(pair.model, prompts)
    ticket = pair.producer.offer(made.past_key_values, made.sequences, prompts["attention_mask"])
    fetched = pair.consumer.fetch(ticket, **prompts)
    for layer, original in zip(fetched["past_key_values"].layers, made.past_key_values.layers, strict=True):
        real = prompts["attention_mask"][:, None, :, None].bool()
        assert torch.equal(layer.keys.where(real, 0), original.keys.where(real, 0))
        assert torch.equal(layer.values.where(real, 0), original.values.where(real, 0))
    assert pair.model.generate(**fetched, max_new_tokens=7, do_sample=False).tolist() == plain(pair.model, prompts)


@pytest.mark.parametrize(
    "lengths", [(50, 20), (30, 1)], ids=["several tokens", "a row of one token needs nothing moved"]
)
def test_the_last_token_is_computed_again_where_no_token_was_generated(full: Pair, lengths: tuple[int, int]) -> None:
    prompts = batch(*lengths)
    cache = DynamicCache(config=full.model.config)
    with torch.no_grad():
        full.model.model(**prompts, past_key_values=cache, position_ids=positions(prompts))
    ticket = full.producer.offer(cache, prompts["input_ids"], prompts["attention_mask"])
    assert go_on(full, ticket, prompts, tokens=8) == plain(full.model, prompts)


def test_several_generated_tokens_go_along(full: Pair) -> None:
    prompts = batch(50)
    made = prefilled(full.model, prompts, tokens=4)
    ticket = full.producer.offer(made.past_key_values, made.sequences)
    assert go_on(full, ticket, {"input_ids": made.sequences}, tokens=4) == plain(full.model, prompts)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_conversation_goes_on_in_the_other_process(pairs, kind: str) -> None:
    """Three turns, each in the process that has not generated the last answer, which computes only what is new."""
    pair = pairs(kind)
    here, there, history = pair.producer, pair.consumer, batch(WINDOW + 3)["input_ids"]
    made = prefilled(pair.model, {"input_ids": history}, tokens=6)
    for turn in range(2):
        ticket = here.offer(made.past_key_values, made.sequences)
        history = torch.cat([made.sequences, batch(4, seed=turn + 1)["input_ids"]], 1)
        fetched = there.fetch(ticket, history)
        assert torch.equal(fetched["input_ids"], history)
        assert fetched["past_key_values"].get_seq_length() == made.sequences.shape[1] - 1
        made = pair.model.generate(**fetched, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        assert made.sequences.tolist() == plain(pair.model, {"input_ids": history}, 6)
        here, there = there, here


def test_a_history_that_was_edited_is_not_fetched(full: Pair) -> None:
    made = prefilled(full.model, batch(40), tokens=6)
    edited = torch.cat([made.sequences, batch(4, seed=1)["input_ids"]], 1)
    edited[0, 20] += 1
    ticket = full.producer.offer(made.past_key_values, made.sequences)
    with pytest.raises(KvxferError) as caught:
        full.consumer.fetch(ticket, edited)
    assert caught.value.kind is FailureKind.DIGEST_DIFFERS
    assert full.consumer.fetch(ticket, made.sequences), "it is there for those whose history it is"


def test_sampling_goes_on_as_well(full: Pair) -> None:
    prompts = batch(50)
    made = prefilled(full.model, prompts)
    fetched = full.consumer.fetch(full.producer.offer(made.past_key_values, made.sequences), **prompts)
    local = {"input_ids": made.sequences, "attention_mask": torch.ones_like(made.sequences)}
    tokens = []
    for kwargs in (fetched, {**local, "past_key_values": made.past_key_values}):
        torch.manual_seed(5)
        tokens.append(full.model.generate(**kwargs, max_new_tokens=9, do_sample=True, top_k=20).tolist())
    assert tokens[0] == tokens[1]


def test_all_memory_is_free_again(full: Pair) -> None:
    before = full.producer.room, full.consumer.room
    prompts = batch(90, 60)
    made = prefilled(full.model, prompts)
    ticket = full.producer.offer(made.past_key_values, made.sequences, prompts["attention_mask"])
    assert full.producer.room < before[0]
    full.consumer.fetch(ticket, **prompts)
    assert full.consumer.room == before[1]
    end = time.monotonic() + 30
    while full.producer.room != before[0]:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_nobody_fetches_is_dropped_after_its_lease(full: Pair) -> None:
    prompts = batch(30)
    made = prefilled(full.model, prompts)
    with CacheExchange(full.model, {"lease": 1.0}, tokens=64) as short:
        short.offer(made.past_key_values, made.sequences)
        assert short.room == 2
        end = time.monotonic() + 30
        while short.room != 4:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_memory_outlives_an_exchange_that_is_forgotten(full: Pair) -> None:
    prompts = batch(40)
    made = prefilled(full.model, prompts)
    forgotten = CacheExchange(full.model)
    memory = weakref.ref(forgotten._arena)
    ticket = forgotten.offer(made.past_key_values, made.sequences)
    agent = forgotten._side.worker.agent
    del forgotten
    gc.collect()
    assert memory() is not None
    assert go_on(full, ticket, prompts) == plain(full.model, prompts)
    agent.close()
