"""A pool for engines that have none: references, and blocks found again by what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvxfer import ArgumentError
from kvxfer.engine import BlockPins, BlockPool, PrefixPool

BLOCK = 2


def filled(pool: PrefixPool, tokens: list[int]) -> list[int]:
    table: list[int] = []
    assert pool.grow(table, len(tokens))
    pool.remember(tokens, table)
    return table


def test_blocks_are_found_by_all_that_is_before_them() -> None:
    pool = PrefixPool(8, BLOCK)
    table = filled(pool, [1, 2, 3, 4, 5])
    assert pool.prefix([1, 2, 3, 4, 9, 9]) == table[:2], "the third block was not whole"
    assert pool.prefix([3, 4]) == [], "the same tokens behind others"
    assert pool.prefix([1, 2, 3]) == table[:1]
    assert pool.prefix([1, 2], salt=b"adapter") == []
    assert pool.prefix([]) == []


def test_pins_keep_blocks_from_being_taken() -> None:
    pool = PrefixPool(4, BLOCK)
    assert isinstance(pool, BlockPool)
    pins = BlockPins(2, pool)
    table = filled(pool, [1, 2, 3, 4])
    assert pins.keep("transfer", table)
    pool.free(table)
    more: list[int] = []
    assert not pool.grow(more, 3 * BLOCK)
    pins.drop("transfer")
    assert pool.grow(more, 3 * BLOCK)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: PrefixPool(0, 4), "blocks must be at least 1"),
        (lambda: PrefixPool(4, 2.0), "block_tokens must be an integer"),  # type: ignore[arg-type]
        (lambda: PrefixPool(4, 4).grow([], -1), "tokens must be at least 0"),
        (lambda: PrefixPool(4, 4).free([2]), "blocks must be in use, and block 2 is not"),
    ],
)
def test_wrong_calls(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()


TABLES = st.lists(st.tuples(st.sampled_from("afr"), st.lists(st.integers(0, 1), max_size=9)), max_size=30)


@given(TABLES)
def test_whatever_engines_do_a_found_block_holds_what_was_asked_for(does: list[tuple[str, list[int]]]) -> None:
    """The memory is played by a dict: what each block holds, with all that is before it."""
    pool, memory, tables = PrefixPool(6, BLOCK), dict[int, tuple[int, ...]](), list[list[int]]()
    for what, tokens in does:
        if what == "f" and tables:
            pool.free(tables.pop(len(tokens) % len(tables))[::-1])
            continue
        table = pool.prefix(tokens)
        for i, block in enumerate(table):
            assert memory[block] == tuple(tokens[: (i + 1) * BLOCK])
        here = len(table)
        if not pool.grow(table, len(tokens)):
            pool.free(table)
            continue
        for i, block in enumerate(table[here:], here):
            assert not any(block in other for other in tables), "a block that is in use was handed out"
            memory[block] = tuple(tokens[: (i + 1) * BLOCK])
        if what == "r":
            pool.remember(tokens, table)
        tables.append(table)
        references = Counter(block for one in tables for block in one)
        assert pool.used() == len(references)


@pytest.mark.parametrize("wrong", [-1, 4], ids=["a window's table, a block given up", "another pool's block"])
def test_what_is_no_block_of_the_pool_is_refused_and_nothing_is_done(wrong: int) -> None:
    """-1 would be the last block: freed under whoever has it, or found by a prefix that it does not hold."""
    pool = PrefixPool(4, BLOCK)
    table = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    found = [*table[:1], wrong]
    for call in (
        lambda: pool.free(found),
        lambda: pool.touch(found),
        lambda: pool.remember([9, 9, 8, 8], found),
        lambda: pool.grow(found, 8),
    ):
        with pytest.raises(ArgumentError, match=f"from 0 to 3, not {wrong}: this pool is for groups of kind 'full'"):
            call()
    assert pool.used() == 4 and pool.prefix([9, 9]) == []
    pool.free(table)
    assert pool.used() == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pool: pool.prefix([1.5, 2.5]), "tokens must be a row of integers, not float64"),
        (lambda pool: pool.prefix([[1, 2]]), "tokens must be a row of integers"),
        (lambda pool: pool.remember(np.ones(2, bool), [0]), "tokens must be a row of integers, not bool"),
        (lambda pool: pool.prefix([1, 2], salt="adapter"), "salt must be bytes, not 'adapter'"),
        (lambda pool: pool.grow((), 2), "table must be a list"),
        (lambda pool: pool.grow(np.array([0]), 8), "table must be a list"),  # which would add ids to ids
    ],
)
def test_wrong_calls_are_answered_and_nothing_is_done(call: Callable[[PrefixPool], object], words: str) -> None:
    pool = PrefixPool(4, BLOCK)
    pool.free(filled(pool, [1, 2]))
    with pytest.raises(ArgumentError, match=words):
        call(pool)
    assert pool.used() == 0 and pool.prefix(np.array([1, 2], np.int32)) == [0]
