"""One of the demo's processes, which prefills or decodes."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from kvxfer_transformers.batching import BatchingExchange
from kvxfer_transformers.demo.cases import CASES, OUTPUT_TOKENS, Case
from kvxfer_transformers.exchange import CacheExchange

__all__ = ["DemoSide"]

RESULT_S = 120.0


class _Exchange(Protocol):
    """How a process prefills, and how it decodes: as ``DemoSide`` does."""

    def prefill(self, case: Case) -> list[str]: ...
    def decode(self, case: Case, tickets: list[str]) -> dict[str, Any]: ...


class DemoSide:
    """Prefills or decodes cases, by name."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._last: object = None
        self._stack = contextlib.ExitStack()
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        sys.stdout = sys.stderr  # whatever a library has to say

    def prefill(self, name: str) -> list[str]:
        """Return the tickets of a case's prompts."""
        return self._way(CASES[name]).prefill(CASES[name])

    def decode(self, name: str, tickets: list[str]) -> dict[str, Any]:
        """Return the tokens of a case, and what was fetched for it."""
        return self._way(CASES[name]).decode(CASES[name], tickets)

    def close(self) -> None:
        self._stack.close()

    def _way(self, case: Case) -> _Exchange:
        """Return the way to run this case, which is kept for the cases that follow."""
        if self._last != (case.kind, case.dtype, case.batching):
            self._stack.close()
            self._last = case.kind, case.dtype, case.batching
            self._current = self._stack.enter_context(_way(case, self._config))
        return self._current


@contextlib.contextmanager
def _way(case: Case, config: dict[str, Any]) -> Iterator[_Exchange]:
    model = case.model()
    if not case.batching:
        with CacheExchange(model, config) as exchange:
            yield _Generate(model, exchange)
        return
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = GenerationConfig(max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=128, use_async_batching=False)
    running = model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    )
    with running as manager, BatchingExchange(manager, config) as batches:
        yield _Batching(manager, batches)


class _Generate:
    """By ``generate()``."""

    def __init__(self, model: Any, exchange: CacheExchange) -> None:
        self._model, self._exchange = model, exchange

    def prefill(self, case: Case) -> list[str]:
        batch = case.batch()
        made = self._model.generate(**batch, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
        return [self._exchange.offer(made.past_key_values, made.sequences, batch["attention_mask"])]

    def decode(self, case: Case, tickets: list[str]) -> dict[str, Any]:
        from transformers import StaticCache

        batch = case.batch()
        length = batch["input_ids"].shape[1]
        most = length + OUTPUT_TOKENS
        cache = StaticCache(config=self._model.config, max_cache_len=most) if case.static else None
        before, start = self._exchange.received, time.monotonic()
        fetched = self._exchange.fetch(tickets[0], **batch, cache=cache)
        seconds, tokens = time.monotonic() - start, int(fetched["past_key_values"].get_seq_length())
        made = self._model.generate(**fetched, max_new_tokens=OUTPUT_TOKENS - 1, do_sample=False)
        return {
            "tokens": made[:, length:].tolist(),
            "fetched": int(batch["attention_mask"][:, :tokens].sum()),
            "kv_bytes": self._exchange.received - before,
            "seconds": seconds,
        }


class _Batching:
    """By continuous batching."""

    def __init__(self, manager: Any, exchange: BatchingExchange) -> None:
        self._manager, self._exchange = manager, exchange

    def prefill(self, case: Case) -> list[str]:
        names = [self._exchange.add_prefill(ids) for ids in case.prompts()]
        self._results(names)
        return [self._exchange.ticket(name) for name in names]

    def decode(self, case: Case, tickets: list[str]) -> dict[str, Any]:
        before, prompts = self._exchange.received, case.prompts()
        names = [self._exchange.add_fetch(ticket, ids) for ticket, ids in zip(tickets, prompts, strict=True)]
        tokens = self._results(names)
        moved = self._exchange.received - before
        # Fetching and decoding go hand in hand here: there is no time of the fetch alone.
        return {"tokens": tokens, "fetched": sum(map(len, prompts)) if moved else 0, "kv_bytes": moved, "seconds": None}

    def _results(self, names: list[str]) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        until = time.monotonic() + RESULT_S
        while set(names) - found.keys() and time.monotonic() < until:
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]
