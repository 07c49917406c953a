"""Plans of known pairs: how few runs, what is refused, windows and states, block tables of kernel blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.geometry import Cache, CopyPlan, Group, Heads, PlanError, Planner, Rank, Region, View, route
from tests.geometry.layouts import KINDS, Kind, Spec, Store, build

ATTENTION, WINDOW, MLA, CPU, FUSED, STATE = KINDS
BLOCKS = 40


def store(
    layout: str,
    n: int = 4,
    *,
    kind: Kind = ATTENTION,
    heads: int = 2,
    window: int = 0,
    layers: int = 3,
    tp: int = 1,
    rank: int = 0,
) -> Store:
    sizes = (6,) * len(kind.planes)
    spec = Spec(kind, tuple(f"l{i}" for i in range(layers)), sizes, heads, window)
    return build(Rank(0, rank), tp, (spec,), (spec.layers,), (layout,), (n,), BLOCKS, seed=7)


def planner(src: Store, dst: Store) -> Planner:
    assignments = route([src.cache], [dst.cache])[dst.cache.rank].assignments[src.cache.rank]
    return Planner(src.cache, dst.cache, assignments)


def plan(src: Store, dst: Store, a: list[int], b: list[int], start: int, tokens: int) -> CopyPlan:
    return planner(src, dst).plan([a], [b], start, tokens)


@pytest.mark.parametrize(
    ("a", "b", "span", "rows", "tail"),
    [
        ("blhnc", "blhnc", (0, 11), 3, 1),  # all of the block is one row, and its part 3 layers x 2 heads
        ("blhnc", "blhnc", (9, 11), 6, 0),  # no part of which begins within the block
        ("blhnc", "blhnc", (0, 12), 3, 0),
        ("blnhc", "blnhc", (0, 11), 3, 1),
        ("hnd", "hnd", (0, 11), 9, 1),  # one row a layer, and its part two
        ("nhd", "nhd", (0, 11), 9, 0),  # one row a layer, in part too
        ("nhd", "blhnc", (0, 11), 3 * 6 * 4 - 6, 0),  # a row for each token and head
    ],
)
def test_the_last_block_goes_whole_where_that_is_fewer_rows(
    a: str, b: str, span: tuple[int, int], rows: int, tail: int
) -> None:
    """If the consumer says that it is its own; what is wanted, and hashed, stays the same."""
    known = planner(store(a), store(b))
    part, whole = (known.plan([[5, 2, 7]], [[1, 3, 8]], *span, own) for own in (False, True))
    assert whole.rows == rows and whole.nbytes - part.nbytes == tail * 2 * 12 * 3
    assert (part.rows > rows) is bool(tail)
    for one, other in zip(part.logical, whole.logical, strict=True):
        assert np.array_equal(one.count, other.count) and np.array_equal(one.token, other.token)


def test_a_long_block_is_not_moved_in_vain() -> None:
    """One token of 4,096 is wanted: the other bytes would take longer than the rows that are saved."""

    def cache(tokens: int) -> Cache:
        view = View("kv", 0, ("a",), (0,), 4, 2 * tokens * 512, 512, "x", Heads(0, 2, 2, tokens * 512), 512)
        return Cache((Region(0, 4 * 2 * tokens * 512),), (Group(tokens),), (view,))

    for tokens, rows in ((64, 1), (4096, 2)):
        sides = cache(tokens), cache(tokens)
        made = Planner(*sides, route(sides[:1], sides[1:])[Rank()].assignments[Rank()]).plan([[1]], [[2]], 0, 1, True)
        assert made.rows == rows


def test_many_runs_keep_the_order_of_stretches() -> None:
    """Beyond a few runs only stretches are sorted, not all rows; what runs() says must still be what the copies say."""
    spec = Spec(ATTENTION, tuple(f"l{i}" for i in range(40)), (6, 6), 4)
    src, dst = (build(Rank(), 1, (spec,), (spec.layers,), (layout,), (8,), BLOCKS, 3) for layout in ("nhd", "hnd"))
    made = plan(src, dst, list(range(20)), list(range(5, 25)), 0, 155)
    runs = made.runs()
    assert len(runs) > 4096
    want = {
        (int(s.src_at[i] + a), int(s.dst_at[i] + b), int(s.row_bytes[i]))
        for s in made.copies
        for i in range(len(s.counts))
        for a, b in zip(s.src_rows, s.dst_rows, strict=True)
    }
    assert set(zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True)) == want


@pytest.mark.parametrize(
    ("a", "b", "start", "tokens", "words"),
    [
        ([1, -1, 3], [1, 2, 3], 0, 12, r"no block for token 4 \(position 1 of a table of 3\).*position 1"),
        ([1, 2], [1, 2, 3], 0, 12, "no block for token 8"),
        ([1, 2, BLOCKS], [1, 2, 3], 0, 12, "source block 40 is outside the cache's 40 blocks"),
        ([1, 2, 3], [1, 2, BLOCKS], 0, 12, "destination block 40 is outside"),
        ([1, 2, 3], [1, 2, 1], 0, 12, "destination block 1 stands at two positions"),
        ([1, 2, 3], [1, 2, 3], 0, 13, "13 tokens do not fit a table of 3 x 4"),
        ([1, 2, 3], [1, 2, 3], 9, 8, "not a span"),
        ([1, 2, 3], [1, 2, 3], -1, 8, "not a span"),
    ],
)
def test_tables_that_cannot_be_joined(a: list[int], b: list[int], start: int, tokens: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(store("hnd"), store("nhd"), a, b, start, tokens)


def test_a_missing_table_is_refused() -> None:
    p = planner(store("hnd"), store("nhd"))
    for tables in (([], [[1]]), ([[1]], [])):
        with pytest.raises(PlanError, match="no block table"):
            p.plan(*tables, 0, 4)


def test_opaque_tokens_are_moved_whole_and_never_cut() -> None:
    src, dst = store("cpu", kind=CPU), store("cpu outer", kind=CPU)
    assert plan(src, dst, [1, 2, 3], [4, 5, 6], 4, 9).nbytes == 2 * 4 * 6 * 2 * 3
    with pytest.raises(PlanError, match="start 5 cuts a block of 4 tokens whose tokens are opaque"):
        plan(src, dst, [1, 2, 3], [4, 5, 6], 5, 9)


@pytest.mark.parametrize(("tokens", "first"), [(12, 1), (13, 1), (14, 1), (15, 1), (16, 2), (17, 2)])
def test_a_window_needs_what_the_next_token_attends_to(tokens: int, first: int) -> None:
    """Window 9, blocks of 4: token 12 attends to [4, 12], token 16 to [8, 16]. Blocks before may lack a source."""
    src, dst = (store("hnd", kind=WINDOW, window=9) for _ in "sd")
    wanted = list(range(10, 15))
    have = [-1 if p < first else p for p in range(5)]
    made = plan(src, dst, have, wanted, 0, tokens)
    assert made.nbytes == (tokens - 4 * first) * 72
    have[first] = -1
    with pytest.raises(PlanError, match=f"no block for token {4 * first}"):
        plan(src, dst, have, wanted, 0, tokens)


def test_no_block_of_a_window_comes_by_half() -> None:
    """Its consumer would take it for whole. Window 9, blocks of 4 at the producer, of 8 at the consumer: token 12 attends to
    [4, 12], of which the producer has blocks 1 to 3, and the consumer's first block would lack tokens 0 to 3."""
    src, dst = store("hnd", kind=WINDOW, window=9), store("hnd", 8, kind=WINDOW, window=9)
    with pytest.raises(
        PlanError, match="only tokens from 4 on .* has given up those before.* that divides the producer's"
    ):
        plan(src, dst, [-1, 5, 6, 7], [2, 3], 0, 12)
    assert (
        plan(src, dst, [4, 5, 6, 7], [2, 3], 0, 12).nbytes
        == plan(src, dst, [-1, 5, 6, 7], [2, 3], 4, 12).nbytes + 4 * 72
    )


def test_large_blocks_keep_templates_small() -> None:
    """Tokens that do not follow each other cost rows: segments are cut, not patterns grown."""
    layers = tuple(f"l{i}" for i in range(64))

    def cache(token: int, head: int) -> Cache:
        page = 1024 * 16 * 8
        offsets = tuple(i * 4 * page for i in range(64))
        view = View("k", 0, layers, offsets, 4, page, 8, "x", Heads(0, 16, 16, head), token)
        return Cache((Region(0, 64 * page * 4),), (Group(1024),), (view,))

    src, dst = cache(128, 8), cache(8, 8192)
    src.check()
    dst.check()
    made = Planner(src, dst, route([src], [dst])[Rank()].assignments[Rank()]).plan([[0, 1]], [[2, 3]], 0, 2000)
    assert made.nbytes == 2000 * 64 * 128
    assert max(len(s.pattern) for s in made.copies) <= 1 << 16
    assert max(len(s.counts) for s in made.copies) <= 2048 // 32
