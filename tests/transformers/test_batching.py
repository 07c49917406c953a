"""Continuous batching goes on in another manager with the tokens of `generate()`."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvxfer import ArgumentError, KvxferError, Source, Ticket, TransferId
from kvxfer_transformers import BatchingExchange, CacheExchange, UnsupportedCacheError
from kvxfer_transformers.demo.models import WINDOW, tiny
from kvxfer_transformers.ticket import BatchTicket
from tests.transformers.conftest import batch, plain, prefilled

LENGTHS = (70, 3, WINDOW - 1, WINDOW, WINDOW + 1, 32, 64, 100)
TOKENS = 8
FOUND: dict[int, dict[str, Any]] = {}


class Managers(NamedTuple):
    model: Any
    prefill: Any
    decode: Any
    producer: BatchingExchange
    consumer: BatchingExchange


def started(stack: ExitStack, model, blocks: int = 64, **settings):
    generation = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        **{"num_blocks": blocks, "page_size": 16, "max_batch_tokens": 48, "use_async_batching": False, **settings}
    )
    return stack.enter_context(
        model.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=batching)
    )


def managers(stack: ExitStack, kind: str, blocks: int = 64, config: dict | None = None) -> Managers:
    models = tiny(kind), tiny(kind)
    prefill, decode = (started(stack, model, blocks) for model in models)
    producer = stack.enter_context(BatchingExchange(prefill, config))
    consumer = stack.enter_context(BatchingExchange(decode, {"transfer_timeout": 5.0}))
    return Managers(tiny(kind), prefill, decode, producer, consumer)


@pytest.fixture(scope="module")
def full() -> Iterator[Managers]:
    with ExitStack() as stack:
        yield managers(stack, "full")


def prompt(length: int, seed: int = 0) -> list[int]:
    return batch(length, seed=seed)["input_ids"][0].tolist()


def results(manager, *requests: str) -> list:
    """Results of these requests, in their order; those of others are kept for who asks for them."""
    found = FOUND.setdefault(id(manager), {})
    end = time.monotonic() + 60
    while set(requests) - found.keys():
        assert time.monotonic() < end, f"only {sorted(found)} of {requests}"
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found[result.request_id] = result
    own = [found.pop(request) for request in requests]
    assert not any(result.error for result in own)
    return own


def ticket_of(m: Managers, ids: list[int]) -> str:
    request = m.producer.add_prefill(ids)
    results(m.prefill, request)
    return m.producer.ticket(request)


def expected(m: Managers, ids: list[int], tokens: int = TOKENS) -> list[int]:
    return plain(m.model, {"input_ids": torch.tensor([ids])}, tokens)[0][len(ids) :]


def eventually(what) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def goes_on(m: Managers, ids: list[int]) -> None:
    (result,) = results(m.decode, m.consumer.add_fetch(ticket_of(m, ids), ids))
    assert result.generated_tokens == expected(m, ids)


@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
def test_tokens_are_those_of_generate(kind: str) -> None:
    """Prompts of one chunk and of several, rings that are not full, just full, and go round; a window of no whole pages."""
    with ExitStack() as stack:
        m = managers(stack, kind)
        prompts = [prompt(length, length) for length in LENGTHS]
        names = [m.producer.add_prefill(ids) for ids in prompts]
        results(m.prefill, *names)
        fetched = [m.consumer.add_fetch(m.producer.ticket(name), ids) for name, ids in zip(names, prompts, strict=True)]
        got = [result.generated_tokens for result in results(m.decode, *fetched)]
        assert got == [expected(m, ids) for ids in prompts]
        assert m.consumer.received > 0
        eventually(lambda: not m.producer._held)
        for manager in (m.prefill, m.decode):
            assert all(
                not allocator.block_table for allocator in manager.batch_processor.cache.cache_allocators.values()
            )


def test_what_is_cached_here_already_is_not_fetched(full: Managers) -> None:
    ids = prompt(80, 7)
    goes_on(full, ids)
    before = full.consumer.received
    goes_on(full, ids)
    whole = 2 * 3 * 80 * 2 * 16 * 4  # keys and values, layers, tokens, heads, head_dim, bytes
    assert 0 <= full.consumer.received - before <= whole // 5


def test_prefill_by_generate_and_decode_by_batching(full: Managers) -> None:
    ids = prompt(50, 8)
    with CacheExchange(full.model) as exchange:
        made = prefilled(full.model, {"input_ids": torch.tensor([ids])})
        ticket = exchange.offer(made.past_key_values, made.sequences)
        before = full.consumer.received
        (result,) = results(full.decode, full.consumer.add_fetch(ticket, ids))
    assert result.generated_tokens == expected(full, ids)
    assert full.consumer.received > before


def test_prefill_by_batching_and_decode_by_generate(full: Managers) -> None:
    ids = prompt(50, 9)
    with CacheExchange(full.model) as exchange:
        fetched = exchange.fetch(ticket_of(full, ids), torch.tensor([ids]))
        made = full.model.generate(**fetched, max_new_tokens=TOKENS - 1, do_sample=False)
    assert made[0, len(ids) :].tolist() == expected(full, ids)


def test_a_prompt_whose_kv_does_not_come_is_prefilled_here(full: Managers, caplog) -> None:
    ids = prompt(60, 10)
    with CacheExchange(full.model) as gone:
        made = prefilled(full.model, {"input_ids": torch.tensor([ids])})
        ticket = gone.offer(made.past_key_values, made.sequences)
    request = full.consumer.add_fetch(ticket, ids)
    goes_on(full, prompt(30, 11))  # meanwhile
    (result,) = results(full.decode, request)
    assert result.generated_tokens == expected(full, ids)
    assert "is prefilled here" in caplog.text


def test_the_first_token_may_be_the_last(full: Managers) -> None:
    ids = prompt(40, 12)
    first = expected(full, ids)[0]
    limited = full.consumer.add_fetch(ticket_of(full, ids), ids, max_new_tokens=1)
    ending = full.consumer.add_fetch(ticket_of(full, ids), ids, eos_token_id=first)
    assert [result.generated_tokens for result in results(full.decode, limited, ending)] == [[first], [first]]


def test_a_cancelled_request_leaves_nothing(full: Managers) -> None:
    ids = prompt(40, 13)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        source = Source("127.0.0.1", mute.getsockname()[1], 1)
        told = BatchTicket((Ticket(TransferId.mint(1, "mute"), b"digest", source),), 39, ((ids[39],),))
        request = full.consumer.add_fetch(told.text, ids)
        eventually(lambda: full.consumer._loads)
        full.decode.cancel_request(request)
        goes_on(full, prompt(30, 14))
        eventually(lambda: not full.consumer._loads and not len(full.consumer._side.scheduler))
    goes_on(full, prompt(30, 15))
    assert request not in FOUND[id(full.decode)]  # it was not prefilled here instead


def test_a_name_in_use_is_refused(full: Managers) -> None:
    """The manager keeps blocks by name: a second request of that name would have those of the first."""
    prompts = [prompt(40, 18), prompt(40, 19)]
    with full.prefill.pause():
        full.producer.add_prefill(prompts[0], "twice")
        with pytest.raises(ArgumentError, match="request_id must be"):
            full.producer.add_prefill(prompts[1], "twice")
    results(full.prefill, "twice")
    tickets = [full.producer.ticket("twice"), ticket_of(full, prompts[1])]
    with full.decode.pause():
        full.consumer.add_fetch(tickets[0], prompts[0], "twice")
        with pytest.raises(ArgumentError, match="request_id must be"):
            full.consumer.add_fetch(tickets[1], prompts[1], "twice")
    for ticket, ids in zip((None, tickets[1]), prompts, strict=True):
        request = "twice" if ticket is None else full.consumer.add_fetch(ticket, ids, "twice")
        assert results(full.decode, request)[0].generated_tokens == expected(full, ids)


def test_a_ticket_that_another_request_is_fetching_is_not_taken_for_fetched(full: Managers, caplog) -> None:
    ids = prompt(40, 20)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        source = Source("127.0.0.1", mute.getsockname()[1], 1)
        told = BatchTicket((Ticket(TransferId.mint(1, "twice"), b"digest", source),), 39, ((ids[39],),))
        requests = [full.consumer.add_fetch(told.text, ids) for _ in range(2)]
        found = results(full.decode, *requests)
    assert [result.generated_tokens for result in found] == 2 * [expected(full, ids)]
    assert "another request is fetching it" in caplog.text
    ids, before = prompt(40, 21), full.consumer.received
    ticket = ticket_of(full, ids)
    with full.decode.pause():
        requests = [full.consumer.add_fetch(ticket, ids) for _ in range(2)]
    assert [result.generated_tokens for result in results(full.decode, *requests)] == 2 * [expected(full, ids)]
    assert full.consumer.received > before  # by the first of them


def test_tickets_that_nobody_asks_for_are_forgotten(full: Managers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer_transformers.batching.MAX_TICKETS", 2)
    requests = [full.producer.add_prefill(prompt(20 + i)) for i in range(3)]
    results(full.prefill, *requests)
    with pytest.raises(ArgumentError, match="whose result has come"):
        full.producer.ticket(requests[0])
    assert all(full.producer.ticket(request) for request in requests[1:])


def test_running_requests_come_before_offers(caplog) -> None:
    """A prefill side that nobody fetches from goes on, and what it has taken back is computed by the other."""
    with ExitStack() as stack:
        m = managers(stack, "full", blocks=8)
        prompts = [prompt(60, seed) for seed in range(4)]
        tickets = [ticket_of(m, ids) for ids in prompts]
        assert "offers unread" in caplog.text
        fetched = [m.consumer.add_fetch(ticket, ids) for ticket, ids in zip(tickets, prompts, strict=True)]
        got = [result.generated_tokens for result in results(m.decode, *fetched)]
        assert got == [expected(m, ids) for ids in prompts]


def test_a_closed_exchange_leaves_the_manager_as_it_was() -> None:
    with ExitStack() as stack:
        model = tiny("full")
        manager = started(stack, model)
        ids = prompt(40, 15)
        with BatchingExchange(manager) as exchange:
            request = exchange.add_prefill(ids)
            results(manager, request)
        exchange.close()
        (result,) = results(manager, manager.add_request(ids, max_new_tokens=TOKENS))
        assert result.generated_tokens == plain(tiny("full"), {"input_ids": torch.tensor([ids])})[0][len(ids) :]
        allocators = manager.batch_processor.cache.cache_allocators.values()
        eventually(lambda: all(not allocator.block_table for allocator in allocators))
        with pytest.raises(KvxferError, match="closed"):
            exchange.add_fetch(exchange.ticket(request), ids)


def test_a_manager_that_does_not_run_is_refused() -> None:
    model = tiny("full")
    manager = model.init_continuous_batching(GenerationConfig(max_new_tokens=2, eos_token_id=-1, pad_token_id=0))
    with pytest.raises(KvxferError, match="the manager must run"):
        BatchingExchange(manager)


def test_asynchronous_batching_is_refused(full: Managers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full.prefill.batch_processor, "use_async_batching", True)
    with pytest.raises(UnsupportedCacheError, match="use_async_batching=False"):
        BatchingExchange(full.prefill)


def test_wrong_arguments_cost_the_offer_nothing(full: Managers) -> None:
    ids = prompt(40, 16)
    ticket = ticket_of(full, ids)
    with pytest.raises(ArgumentError, match="request_id must name a prefill"):
        full.producer.ticket("no such request")
    for wrong, word in [
        (("no ticket", ids), "ticket must be"),
        ((ticket, ids[:-1]), "40 tokens"),
        ((ticket, [*ids, 1, 2]), "the ticket's prompt"),
        ((ticket, []), "input_ids must be"),
        ((ticket, ["a"]), "input_ids must be"),
    ]:
        with pytest.raises(ArgumentError, match=word):
            full.consumer.add_fetch(*wrong)
    (result,) = results(full.decode, full.consumer.add_fetch(ticket, ids))
    assert result.generated_tokens == expected(full, ids)


def test_another_prompt_than_the_offered_is_prefilled_here(full: Managers, caplog) -> None:
    ids = prompt(40, 17)
    other = [ids[0] ^ 1, *ids[1:]]
    (result,) = results(full.decode, full.consumer.add_fetch(ticket_of(full, ids), other))
    assert "digest_differs" in caplog.text
    assert result.generated_tokens == expected(full, other)
