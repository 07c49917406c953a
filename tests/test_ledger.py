"""The ledger of blocks, against a list of claims that is looked through from its beginning."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer import BlockTable
from kvxfer.ledger import BlockLedger

HOLDERS, GENERATIONS = st.sampled_from("abcd"), st.integers(0, 3)
ROWS = st.lists(st.lists(st.integers(-1, 7), max_size=5, unique_by=lambda b: (b, b == -1)), min_size=3, max_size=3)
SPACES = {0: 0, 1: 1, 2: 1}
"""The first group's blocks are its own; the other two share theirs."""


class Naive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(SPACES)
        self.claims: list[tuple[str, int, bool, set[tuple[int, int]]]] = []  # holder, generation, fills, (space, block)

    @rule(holder=HOLDERS, rows=ROWS, fills=st.booleans(), generation=GENERATIONS, first=st.integers(0, 2))
    def claim(self, holder: str, rows: list[list[int]], fills: bool, generation: int, first: int) -> None:
        wanted = {(SPACES[g], block) for g, row in enumerate(rows) for block in row[first:4] if block >= 0}
        blocks = self.ledger.blocks(BlockTable.of(rows), [(g, (first, 4)) for g in range(3)])
        found = self.ledger.overlap(blocks, fills=fills)
        clash: set[tuple[int, Any]] = {
            (block, by) for by, _, other, ids in self.claims if fills or other for _, block in ids & wanted
        }
        assert (found is None) == (not clash) and (found is None or found in clash)
        if not clash:
            self.ledger.claim(holder, blocks, holder, fills=fills, generation=generation)
            self.claims.append((holder, generation, fills, wanted))

    @rule(holder=HOLDERS, generation=GENERATIONS)
    def drop(self, holder: str, generation: int) -> None:
        self.ledger.drop(holder, generation)
        self.claims = [one for one in self.claims if one[0] != holder or one[1] > generation]

    @invariant()
    def remembers_no_more(self) -> None:
        assert len(self.ledger) == len({holder for holder, *_ in self.claims})
        assert self.ledger.filling == any(fills and ids for _, _, fills, ids in self.claims)


TestNaive = Naive.TestCase
TestNaive.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_groups_of_which_nothing_is_known_share_their_blocks() -> None:
    ledger = BlockLedger()
    ledger.claim("a", ledger.all(BlockTable.of([[1], [2]])), "a", fills=True)
    assert ledger.overlap(ledger.all(BlockTable.of([[2], [3]])), fills=False) == (2, "a")
    ledger.learn({0: 0, 1: 1})
    ledger.drop("a")
    ledger.claim("a", ledger.all(BlockTable.of([[1], [2]])), "a", fills=True)
    assert ledger.overlap(ledger.all(BlockTable.of([[2], [1]])), fills=True) is None
