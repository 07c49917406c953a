"""What is to be cleared around a load: with what the plan writes it is all that the load's blocks hold, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.geometry import uncovered
from tests.geometry.engines import BLOCKS, Case, Ints, cases
from tests.geometry.layouts import Bytes, Store
from tests.geometry.test_law import LAW


def cleared(store: Store, tables: list[Ints], start: int, tokens: int) -> Bytes:
    """How often each byte is in the rest."""
    out = np.zeros(len(store.image), np.uint8)
    origin = store.cache.regions[0].address if store.cache.regions else 0
    at = {s: r.address - origin - s for s, r in zip(store.cache.starts, store.cache.regions, strict=True)}
    assert not any(at.values()), "flat offsets are offsets into the image"
    for hole in uncovered(store.cache, tables, start, tokens):
        for place, *steps in itertools.product(hole.places, *(range(0, n * s, s) for n, s in hole.axes)):
            out[place + sum(steps) : place + sum(steps) + hole.unit] += 1
    return out


def content(case: Case, store: Store, tables: list[Ints], start: int) -> tuple[Bytes, Bytes]:
    """For every byte whether it is content of a block of the tables, of a token from ``start`` on; and whether the last of
    the tokens in it is one that nobody attends to. States are no such content."""
    held, past = np.zeros((2, len(store.image)), np.uint8)
    before = store.image.copy()
    for of, mark in ((held, 1), (past, 2)):
        store.image[:] = 0
        for (g, _, _), piece in store.held.items():
            kind, n = piece.spec.kind, store.cache.groups[g].block_tokens
            if kind.group == "state":
                continue
            ignored = max(0, case.tokens - piece.spec.window + 1) if piece.spec.window else 0
            for p, block in enumerate(tables[g]):
                for t in range(n) if block >= 0 else ():
                    if p * n + (t if kind.cut_tokens else n - 1) >= start and (mark == 1 or p * n + t < ignored):
                        at = piece.own(p * n + t) if kind.cut_tokens else 0
                        for head in () if at is None else range(*piece.heads) if kind.cut_heads else piece.heads[:1]:
                            piece.cell(int(block), head, at % (n // piece.turn[1]))[:] = 1
        of[:] = store.image
    store.image[:] = before
    return held, past


@LAW
@given(cases(), st.data())
def test_the_plan_and_the_rest_are_all_that_the_blocks_hold(case: Case, data: st.DataObject) -> None:
    tables = []
    for table in case.consumer.tables:  # an engine may have allocated more than the tokens need
        free = [b for b in range(BLOCKS * 4) if b not in table]
        tail = data.draw(st.lists(st.sampled_from(free), max_size=4, unique=True))
        tables.append(np.concatenate([table, np.array(tail, np.int64)]))
    for store in case.consumer.stores.values():
        _, written = case.expect(store)
        zeroed = cleared(store, tables, case.start, case.tokens)
        held, past = content(case, store, tables, case.start)
        assert zeroed.max(initial=0) <= 1
        assert not (zeroed & (1 - held)).any(), (
            "something else is cleared: another block, padding, or what was there before"
        )
        assert not (held & (1 - zeroed) & (1 - written)).any(), "something is left as it was"
        assert not (zeroed & written & (1 - past)).any(), "something is cleared that is loaded and attended to"
