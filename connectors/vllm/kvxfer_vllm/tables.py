"""vLLM's block tables, as kvxfer has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvxfer.values import BlockTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["NULL_BLOCK", "step_tables", "table_of"]

NULL_BLOCK = 0
"""vLLM's block 0 stands for "no block"; it never holds data."""


def table_of(block_ids: Sequence[Sequence[int]]) -> BlockTable:
    """Return vLLM's block table with its null block spelt as ours."""
    return BlockTable.of(block_ids, NULL_BLOCK)


def step_tables(output: SchedulerOutput, follows: Callable[[str], bool]) -> Iterator[tuple[str, int, BlockTable]]:
    """Yield the requests of a step whose tables matter, with the tokens computed before it and the whole table as it uses it."""
    state, cached = output.kv_connector_block_state, output.scheduled_cached_reqs
    seen = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    seen += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for name, computed in seen:
        if follows(name):
            yield name, computed, table_of(state.get_block_ids(name))
