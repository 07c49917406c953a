"""What is not moved is refused by name, with advice; what goes wrong costs nobody else anything."""

import queue
import socket
import threading
import time
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    MambaConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import QuantizedLayer

from kvxfer import ArgumentError, FailureKind, KvxferError, Source, Ticket, TransferId
from kvxfer_transformers import CacheExchange, UnsupportedCacheError
from kvxfer_transformers.arena import Arena
from kvxfer_transformers.demo.models import WINDOW, tiny
from kvxfer_transformers.ticket import BatchTicket
from tests.transformers.conftest import Pair, batch, plain, prefilled


def test_models_that_keep_states_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(UnsupportedCacheError, match="linear attention.*one process"):
        CacheExchange(model)


def test_encoder_decoders_are_refused() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedCacheError, match="encoder-decoder"):
        CacheExchange(model)


def test_a_device_without_a_space_is_refused(full: Pair) -> None:
    with pytest.raises(UnsupportedCacheError, match="the model is on meta: .*write-a-memory-space"):
        CacheExchange(tiny("full").to("meta"))


class Quantized(QuantizedLayer):
    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_quantised_caches_are_refused(full: Pair) -> None:
    cache = DynamicCache(config=full.model.config)
    cache.layers[1] = Quantized()
    with pytest.raises(UnsupportedCacheError, match="Quantized.*use a DynamicCache"):
        full.producer.offer(cache, torch.ones(1, 5, dtype=torch.long))


@pytest.mark.parametrize(
    ("cache", "word"),
    [
        (lambda config: EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
        (lambda config: None, "NoneType is not a transformers Cache"),
        (lambda config: ((torch.zeros(1, 2, 3, 4),) * 2,), "tuple is not a transformers Cache"),
        (lambda config: DynamicCache(config=config), "0 layers"),
    ],
)
def test_what_is_no_cache_of_the_model_is_refused(full: Pair, cache, word: str) -> None:
    with pytest.raises(UnsupportedCacheError, match=word):
        full.producer.offer(cache(full.model.config), torch.ones(1, 5, dtype=torch.long))


def test_another_models_cache_is_refused(full: Pair, pairs) -> None:
    made = prefilled(pairs("latent").model, batch(9))
    with pytest.raises(UnsupportedCacheError, match="layer 0 of the cache is not as this model writes it"):
        full.producer.offer(made.past_key_values, made.sequences)


def test_a_window_that_has_moved_past_what_is_needed_is_refused(pairs) -> None:
    pair = pairs("sliding")
    prompts = batch(WINDOW + 8)
    made = prefilled(pair.model, prompts)
    with pytest.raises(UnsupportedCacheError, match="return_dict_in_generate"):
        pair.producer.offer(made.past_key_values, prompts["input_ids"])


def test_padding_on_the_right_is_refused(full: Pair) -> None:
    prompts = batch(20, 10)
    made = prefilled(full.model, prompts)
    with pytest.raises(UnsupportedCacheError, match="padding_side='left'"):
        full.producer.offer(made.past_key_values, made.sequences, prompts["attention_mask"].flip(1))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sequences": [[1, 2]]}, "sequences must be a tensor"),
        ({"sequences": torch.ones(2, 21)}, "sequences must be a tensor"),
        ({"sequences": torch.ones(1, 21, dtype=torch.long)}, "a row for each of the 2 rows"),
        ({"sequences": torch.ones(2, 7, dtype=torch.long)}, "all 20 tokens"),
        ({"attention_mask": torch.ones(3, 20)}, "attention_mask must be"),
        ({"attention_mask": torch.ones(2, 99)}, "attention_mask must be"),
    ],
)
def test_arguments_of_an_offer(full: Pair, change, word: str) -> None:
    made = prefilled(full.model, batch(20, 20))
    with pytest.raises(ArgumentError, match=word):
        full.producer.offer(**{"cache": made.past_key_values, "sequences": made.sequences, **change})


def offered(pair: Pair, prompts) -> str:
    made = prefilled(pair.model, prompts)
    return pair.producer.offer(made.past_key_values, made.sequences, prompts["attention_mask"])


def fetch_after(pair: Pair, ticket: str, prompts) -> None:
    """The offer has not been hurt by what was tried with its ticket."""
    made = pair.model.generate(**pair.consumer.fetch(ticket, **prompts), max_new_tokens=7, do_sample=False)
    assert made.tolist() == plain(pair.model, prompts)


def test_arguments_of_a_fetch(full: Pair) -> None:
    prompts = batch(20, 12)
    ticket, ids, mask = offered(full, prompts), *prompts.values()
    for wrong, word in [
        (("no ticket", ids, mask), "ticket must be"),
        ((ticket[:-9], ids, mask), "ticket must be as"),
        ((None, ids, mask), "ticket must be"),
        ((ticket, ids[:1], mask[:1]), "2 rows"),
        ((ticket, ids[:, 1:], mask[:, 1:]), "20 tokens"),
        ((ticket, torch.cat([ids, ids + 1], 1), torch.cat([mask, mask], 1)), "left"),
        ((ticket, torch.cat([ids, ids], 1)), "other ids"),
    ]:
        with pytest.raises(KvxferError, match=word):
            full.consumer.fetch(*wrong)
    used = prefilled(full.model, prompts).past_key_values
    with pytest.raises(ArgumentError, match="cache must be empty"):
        full.consumer.fetch(ticket, ids, mask, cache=used)
    fetch_after(full, ticket, prompts)


def test_another_prompt_than_the_offered_is_never_delivered(full: Pair) -> None:
    prompts = batch(20, 12)
    ticket, ids, mask = offered(full, prompts), *prompts.values()
    other = ids.clone()
    other[1, -2] += 1
    room = full.consumer.room
    with pytest.raises(KvxferError) as caught:
        full.consumer.fetch(ticket, other, mask)
    assert caught.value.kind is FailureKind.DIGEST_DIFFERS
    assert full.consumer.room == room


def test_a_salt_is_part_of_what_must_agree(full: Pair) -> None:
    prompts = batch(20)
    made = prefilled(full.model, prompts)
    ticket = full.producer.offer(made.past_key_values, made.sequences, salt="image 1")
    with pytest.raises(KvxferError) as caught:
        full.consumer.fetch(ticket, **prompts, salt="image 2")
    assert caught.value.kind is FailureKind.DIGEST_DIFFERS


def test_a_fetch_that_is_refused_takes_no_room(full: Pair) -> None:
    prompts = batch(20)
    made = prefilled(full.model, prompts)
    ticket, room = full.producer.offer(made.past_key_values, made.sequences), full.consumer.room
    with pytest.raises(ArgumentError, match="salt must be a str"):
        full.consumer.fetch(ticket, **prompts, salt=1)
    assert full.consumer.room == room
    full.consumer.fetch(ticket, **prompts)


@pytest.mark.parametrize("tail", [((1,), (1, 2)), ((), ())])
def test_a_ticket_whose_rows_differ_is_none(tail: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ArgumentError, match="do not fit each other"):
        BatchTicket.read(BatchTicket((None, None), 0, tail).text)


def test_other_weights_never_meet(full: Pair) -> None:
    ticket = offered(full, prompts := batch(20))
    with CacheExchange(tiny("full", seed=1)) as stranger, pytest.raises(KvxferError, match="weights") as caught:
        stranger.fetch(ticket, **prompts)
    assert caught.value.kind is FailureKind.INCOMPATIBLE


class Adapted(torch.nn.Module):
    """A layer with a LoRA adapter, with the attributes by which PEFT's layers have them."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A")

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base_layer, self.active_adapters, self.disable_adapters = layer, ["default"], False
        self.scaling, self.lora_embedding_A = {"default": 1.0}, torch.nn.ParameterDict()
        down, up = torch.nn.Linear(layer.in_features, 4, bias=False), torch.nn.Linear(4, layer.out_features, bias=False)
        self.lora_A, self.lora_B = torch.nn.ModuleDict({"default": down}), torch.nn.ModuleDict({"default": up})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        if self.disable_adapters:
            return out
        return out + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


def adapted() -> tuple[Any, Adapted]:
    """A model and the layer of it that has an adapter."""
    model = tiny("full")
    attention = model.model.layers[1].self_attn
    attention.k_proj = layer = Adapted(attention.k_proj)
    model._hf_peft_config_loaded, model.active_adapters = True, lambda: ["default"]
    return model, layer


@pytest.mark.parametrize("change", ["weights", "scaling", "disabled"])
def test_other_adapters_of_one_name_never_meet(change: str) -> None:
    prompts, (ours, _), (theirs, layer) = batch(20), adapted(), adapted()
    made = prefilled(ours, prompts)
    with CacheExchange(ours) as producer, CacheExchange(theirs) as consumer:
        consumer.fetch(producer.offer(made.past_key_values, made.sequences), **prompts)
        if change == "weights":
            torch.nn.init.normal_(layer.lora_A["default"].weight)
        layer.scaling["default"] = 2.0 if change == "scaling" else 1.0
        layer.disable_adapters = change == "disabled"
        ticket = producer.offer(made.past_key_values, made.sequences)
        with pytest.raises(KvxferError) as caught:
            consumer.fetch(ticket, **prompts)
        assert caught.value.kind is FailureKind.DIGEST_DIFFERS


def test_another_rope_never_meets(full: Pair) -> None:
    config = LlamaConfig(
        **{**full.model.config.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    )
    other = AutoModelForCausalLM.from_config(config)
    other.load_state_dict(full.model.state_dict())
    ticket = offered(full, prompts := batch(20))
    with CacheExchange(other.eval()) as stranger, pytest.raises(KvxferError, match="config") as caught:
        stranger.fetch(ticket, **prompts)
    assert caught.value.kind is FailureKind.INCOMPATIBLE


def test_a_ticket_serves_one_fetch(full: Pair) -> None:
    ticket = offered(full, prompts := batch(20))
    full.consumer.fetch(ticket, **prompts)
    with pytest.raises(KvxferError):
        full.consumer.fetch(ticket, **prompts)


def test_a_ticket_that_is_being_fetched_is_refused_at_once(full: Pair) -> None:
    ids = batch(40)["input_ids"]
    limits = {"peer_timeout": 3.0, "start_timeout": 4.0, "transfer_timeout": 4.0}
    with socket.create_server(("127.0.0.1", 0)) as mute, CacheExchange(full.model, limits) as exchange:
        source = Source("127.0.0.1", mute.getsockname()[1], 1)
        told = BatchTicket((Ticket(TransferId.mint(1, "twice"), b"digest", source),), 39, ((int(ids[0, 39]),),))
        room, failures = exchange.room, queue.SimpleQueue[KvxferError]()

        def fetch() -> None:
            try:
                exchange.fetch(told.text, ids)
            except KvxferError as error:
                failures.put(error)

        threads = [threading.Thread(target=fetch) for _ in range(2)]
        for thread in threads:
            thread.start()
        first, last = failures.get(timeout=300), failures.get(timeout=300)
        for thread in threads:
            thread.join()
        assert first.kind is FailureKind.MISUSE and "fetching it already" in str(first)
        assert last.kind is FailureKind.PEER_UNREACHABLE
        assert exchange.room == room


def test_the_memory_of_a_fetch_that_is_interrupted_is_free_once_it_has_ended(
    full: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C in a notebook: the exchange had it no more, however often that was done."""
    ids = batch(40)["input_ids"]
    with socket.create_server(("127.0.0.1", 0)) as mute, CacheExchange(full.model) as exchange:
        source = Source("127.0.0.1", mute.getsockname()[1], 1)
        told = BatchTicket((Ticket(TransferId.mint(1, "left"), b"digest", source),), 39, ((int(ids[0, 39]),),))
        room = exchange.room

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("kvxfer_transformers.exchange.select.select", interrupt)
            exchange.fetch(told.text, ids)
        end = time.monotonic() + 30
        while exchange.room != room:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_the_memory_of_an_offer_that_cannot_be_stored_is_free(full: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = batch(40, 40)
    made = prefilled(full.model, prompts)
    room, store = full.producer.room, Arena.store

    def fail(arena: Arena, index: int, side: int, *rest: Any) -> None:
        if index == 1 and side == 1:
            raise MemoryError("none left")
        store(arena, index, side, *rest)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Arena, "store", fail)
        full.producer.offer(made.past_key_values, made.sequences)
    assert full.producer.room == room


def test_a_full_exchange_says_so_and_goes_on(full: Pair) -> None:
    prompts = batch(40, 40)
    made = prefilled(full.model, prompts)
    with CacheExchange(full.model, tokens=5 * 16) as small:
        with pytest.raises(KvxferError, match="tokens") as caught:
            small.offer(made.past_key_values, made.sequences)
        assert caught.value.kind is FailureKind.OVERLOADED
        assert small.room == 5
        one = prefilled(full.model, batch(40, seed=1))
        assert small.offer(one.past_key_values, one.sequences)


def test_a_producer_that_is_gone_is_told_within_the_deadline(full: Pair) -> None:
    prompts = batch(20)
    with CacheExchange(full.model) as gone:
        made = prefilled(full.model, prompts)
        ticket = gone.offer(made.past_key_values, made.sequences)
    with CacheExchange(full.model, {"transfer_timeout": 2.0}) as consumer:
        with pytest.raises(KvxferError, match="has not come"):
            consumer.fetch(ticket, **prompts)
        assert consumer.room == 512


def test_a_closed_exchange_says_so(full: Pair) -> None:
    made = prefilled(full.model, batch(20))
    closed = CacheExchange(full.model)
    closed.close()
    closed.close()
    with pytest.raises(KvxferError, match="closed"):
        closed.offer(made.past_key_values, made.sequences)


def test_a_cache_to_fill_must_be_of_a_known_kind(full: Pair) -> None:
    ticket = offered(full, prompts := batch(20))
    cache = StaticCache(config=full.model.config, max_cache_len=64)
    cache.layers[0] = Quantized()
    with pytest.raises(UnsupportedCacheError, match="Quantized"):
        full.consumer.fetch(ticket, **prompts, cache=cache)
    short = StaticCache(config=full.model.config, max_cache_len=10)
    with pytest.raises(ArgumentError, match="max_cache_len"):
        full.consumer.fetch(ticket, **prompts, cache=short)
    fetch_after(full, ticket, prompts)
