"""A prompt is streamed by chunk also where one block holds all of it, as far as the cache can be cut by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvxfer.testing.engine import PagedEngine, PagedMemory, until

BLOCK, CHUNK, PROMPT, HEADS, UNIT = 64, 10, 50, 4, 4
MINE = 3

WAYS = {"read": ["read"], "written": ["write"], "sent": ["send", "recv"]}
DIRECT, STAGED = 1, 1 << 20
"""Bytes of a row below which what is moved is packed, for a back end to which all rows are long, and one to which none is."""


@contextmanager
def engines(options: dict[str, Any], *both: PagedMemory) -> Iterator[tuple[PagedEngine, PagedEngine]]:
    config = {"backend_options": options, "transfer_timeout": 60.0, "peer_timeout": 60.0}
    with PagedEngine(config, both[0]) as p, PagedEngine(config, both[1]) as d:
        yield p, d


def memory(dims: str, block: int, **more: Any) -> PagedMemory:
    """Memory with these axes, and blocks of so many tokens."""
    return PagedMemory(layers=2, tokens=block, heads=HEADS, unit=UNIT, dims=dims, **more)


def stream(p: PagedEngine, d: PagedEngine, theirs: list[int], by_token: bool) -> None:
    """Have a prompt computed by chunk, the next one once this one is there if ``by_token``, and compare every byte."""
    ticket = p.ask("p", PROMPT)
    d.load("d", ticket, PROMPT, theirs)
    kv = d.memory.content(ticket.digest, PROMPT).swapaxes(0, 1)

    def here(end: int) -> bool:
        blocks = d.memory.read(theirs)
        rows = blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])
        return np.array_equal(rows[:, :end], kv[:, :end])

    def listen(true: Callable[[], object]) -> None:
        until(lambda: (d.step(), p.step()) and (d.failed or true()))
        assert not d.failed, d.failed

    for start in range(0, PROMPT, CHUNK):
        p.run("p", ticket.digest, start, start + CHUNK, [MINE])
        p.step()
        if by_token:
            listen(lambda end=start + CHUNK: here(end))  # type: ignore[misc]
    listen(lambda: d.loaded == {"d"})
    d.verify()  # with the tokens beyond the prompt, which nobody may touch


@pytest.mark.keep(8)
@pytest.mark.parametrize("verbs", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("row", [DIRECT, STAGED], ids=["direct", "staged"])
@pytest.mark.parametrize("block", [BLOCK, 16, 7], ids=["into_one_block", "into_blocks_of_16", "into_blocks_of_7"])
@pytest.mark.parametrize("theirs", ["layer block head token unit", "layer block token head unit"])
def test_a_block_for_each_request_comes_by_chunk(verbs: list[str], row: int, block: int, theirs: str) -> None:
    """Whoever moves the bytes, packed or not, from rows by head into rows by head or by token."""
    both = memory("layer block head token unit", BLOCK), memory(theirs, block)
    with engines({"verbs": verbs, "run_bytes": row}, *both) as (p, d):
        stream(p, d, list(range(5, 5 + -(-PROMPT // block))), by_token=True)
        packed = sum(engine.worker.agent.stats().staged for engine in (p, d))
        assert (packed > 0) == (row == STAGED)


@pytest.mark.parametrize("verbs", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("row", [DIRECT, STAGED], ids=["direct", "staged"])
def test_a_block_whose_tokens_lie_in_its_unit_comes_once_it_is_full(verbs: list[str], row: int) -> None:
    both = (memory("layer block token head unit", BLOCK, described="layer block unit unit unit") for _ in "pd")
    with engines({"verbs": verbs, "run_bytes": row}, *both) as (p, d):
        stream(p, d, [5], by_token=False)
