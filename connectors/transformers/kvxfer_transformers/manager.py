"""Access to what the manager of continuous batching does not make public: everything that another release may change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from kvxfer import KvxferError
from kvxfer_transformers.layers import UnsupportedCacheError

__all__ = ["Hooks", "batch_processor", "go_on", "rename", "reserve"]

START_S = 60.0
"""The most seconds that a manager may take to start."""


class Hooks:
    """Methods of a manager's parts that are replaced while an exchange lives."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []

    def add(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """Have ``hook`` called instead of a method, with the method as its first argument."""
        original = getattr(owner, name)
        setattr(owner, name, lambda *arguments, **named: hook(original, *arguments, **named))
        self._replaced.append((owner, name))

    def remove(self) -> None:
        """Restore all methods."""
        for owner, name in self._replaced:
            delattr(owner, name)
        self._replaced.clear()


@dataclass(frozen=True)
class _Span:
    """What the paged cache needs of a request to give it blocks."""

    request_id: str
    start: int

    def current_len(self) -> int:
        """Return how many tokens it has blocks for."""
        return self.start


def batch_processor(manager: Any) -> Any:
    """Return what runs the manager's batches. Blocks until the manager has started.

    Raises:
        UnsupportedCacheError: It works in a way that is not supported.
        KvxferError: The manager does not run.
    """
    until = time.monotonic() + START_S
    while manager.is_running() and manager.batch_processor is None and time.monotonic() < until:
        time.sleep(0.01)
    processor = manager.batch_processor
    if not manager.is_running() or processor is None:
        raise KvxferError("the manager must run: use model.continuous_batching_context_manager(), or start it first")
    if processor.use_async_batching:
        raise UnsupportedCacheError(
            "asynchronous batching is not supported: use ContinuousBatchingConfig(use_async_batching=False)"
        )
    if manager.num_return_sequences > 1:
        raise UnsupportedCacheError("several sequences of one prompt are not supported: use num_return_sequences=1")
    if manager.distributed_helper.tp_size > 1:
        raise UnsupportedCacheError("tensor parallelism is not supported here: run the model in one process")
    return processor


def reserve(paged: Any, name: str, start: int, tokens: int) -> bool:
    """Give a request blocks for tokens ``[start, tokens)``, evicting cached prefixes if needed; return whether there was room."""
    span = _Span(name, start)
    if paged.can_store_request_tokens(span, tokens - start):
        return True
    evicted = paged.evict_cached_blocks()
    paged.pool.try_to_free_sectors()
    return bool(evicted and paged.can_store_request_tokens(span, tokens - start))


def rename(paged: Any, before: str, after: str) -> None:
    """Give the blocks of one request to another."""
    for allocator in paged.cache_allocators.values():
        allocator.block_table[after] = allocator.block_table.pop(before)


def go_on(processor: Any, state: RequestState, ids: list[int], tokens: int) -> None:
    """Let a request run that has the KV of its first ``tokens`` ids; ``ids`` are its prompt and what was generated elsewhere."""
    paged, scheduler = processor.cache, processor.scheduler
    state.generated_tokens = ids[len(state.initial_tokens) :]
    state.remaining_prefill_tokens = ids[tokens:]
    state.position_offset = tokens
    state.status = RequestStatus.PREFILLING
    if paged.use_prefix_sharing:
        whole = {n: tokens // allocator.tokens_per_page for n, allocator in paged.cache_allocators.items()}
        paged.mark_complete_blocks(state, whole)
    ended = state._eos_token_ids & set(state.generated_tokens[-1:])
    scheduler.active_requests[state.request_id] = state
    if ended or state.generated_len() >= state._new_tokens_limit:
        state.status = RequestStatus.FINISHED
        scheduler.finish_request(state.request_id)
        processor.output_router.deliver(state.to_generation_output())
    elif state.streaming and state.generated_tokens:
        processor.output_router.deliver(state.to_generation_output())
