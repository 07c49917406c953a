"""vLLM's block tables, as kvxfer has them. With a step vLLM tells the new blocks of most requests only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvxfer.values import BlockTable
from kvxfer_vllm.requests import RequestFacts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["NULL_BLOCK", "step_tables", "table_of"]

NULL_BLOCK = 0
"""vLLM's block 0 stands for "no block"; it never holds data."""


def table_of(block_ids: Sequence[Sequence[int]]) -> BlockTable:
    """Return vLLM's block table with its null block spelt as ours."""
    return BlockTable.of(block_ids, NULL_BLOCK)


def step_tables(
    output: SchedulerOutput, follows: Callable[[str], bool], requests: Mapping[str, RequestFacts]
) -> Iterator[tuple[str, int, BlockTable]]:
    """Yield the requests of a step whose tables matter, with the tokens computed before it and the whole table as it uses it.

    Args:
        output: The step.
        follows: Returns whether the table of a request matters.
        requests: What is known of requests, where the tables so far are noted.
    """
    whole = getattr(getattr(output, "kv_connector_block_state", None), "get_block_ids", None)
    cached, seen = output.scheduled_cached_reqs, list[tuple[str, int]]()
    for new in output.scheduled_new_reqs:
        if follows(new.req_id):
            requests[new.req_id].table = [list(row) for row in new.block_ids]
            seen.append((new.req_id, new.num_computed_tokens))
    for i, name in enumerate(cached.req_ids):
        if follows(name):
            _grow(requests[name], cached.new_block_ids[i], name in cached.resumed_req_ids)
            seen.append((name, cached.num_computed_tokens[i]))
        elif name in requests:
            requests[name].table = None
    for name, computed in seen:
        table = whole(name) if whole is not None else None
        yield name, computed, table_of(table if table is not None else requests[name].table or ())


def _grow(facts: RequestFacts, new: Sequence[Sequence[int]] | None, resumed: bool) -> None:
    """Append new blocks; those of a resumed request replace its table."""
    if resumed and new is not None:
        facts.table = [list(row) for row in new]
    elif new is not None and facts.table is not None:
        for row, more in zip(facts.table, new, strict=True):
            row.extend(more)
