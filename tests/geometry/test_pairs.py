"""Every layout into every layout of the same content, none left to chance: block sizes both ways, TP both ways, a
prefix that cuts blocks, a partial last block, pieces small enough to cut through rows."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.geometry import CopyPlan, Planner, Rank, route
from tests.geometry.engines import Case, RankStores
from tests.geometry.layouts import KINDS, Kind, Spec, build

PAIRS = [(kind, src) for kind in KINDS for src in kind.layouts]


def engine(spec: Spec, layout: str, n: int, tp: int, tokens: int, seed: int) -> RankStores:
    rng = np.random.default_rng(seed)
    table = rng.permutation(20)[: -(-tokens // n)].astype(np.int64)
    stores = {
        Rank(0, r): build(Rank(0, r), tp, (spec,), (spec.layers,), (layout,), (n,), 20, seed + r) for r in range(tp)
    }
    return RankStores(stores, [table])


def check(case: Case, limit: int) -> None:
    """Move everything in pieces of ``limit`` bytes and compare with logical indexing."""
    case.fill()
    after = {c: case.expect(s)[0] for c, s in case.consumer.stores.items()}
    sources, sinks = case.producer.stores, case.consumer.stores
    for c, r in route([s.cache for s in sources.values()], [s.cache for s in sinks.values()]).items():
        for p, assignments in r.assignments.items():
            made = Planner(sources[p].cache, sinks[c].cache, assignments).plan(
                case.producer.tables, case.consumer.tables, case.start, case.tokens
            )
            moved = 0
            for piece in made.split(limit):
                copy(piece, sources[p].image, sinks[c].image)
                moved += piece.nbytes
            assert moved == made.nbytes
    for c, image in after.items():
        assert np.array_equal(sinks[c].image, image)


def copy(plan: CopyPlan, source: np.ndarray, target: np.ndarray) -> None:
    for s in plan.copies:
        for at, to, n in zip(s.src_at, s.dst_at, s.row_bytes, strict=True):
            for a, b in zip(s.src_rows, s.dst_rows, strict=True):
                target[to + b : to + b + n] = source[at + a : at + a + n]


@pytest.mark.keep(8)
@pytest.mark.parametrize(("kind", "src"), PAIRS, ids=[f"{k.name}: {s}" for k, s in PAIRS])
def test_any_layout_into_any_layout(kind: Kind, src: str) -> None:
    layers, tokens = ("l0", "l1", "l2"), 13
    sizes = [(4, 4), (4, 6), (6, 4), (3, 6)] if kind.cut_tokens else [(4, 4)]
    tps = [(1, 1), (1, 2), (2, 1), (4, 2)] if kind.cut_heads else [(1, 1), (2, 2)]
    for dst in kind.layouts:
        for i, (a, b) in enumerate(sizes):
            spec = Spec(kind, layers, (6,) * len(kind.planes), 2, 50 if kind.group == "window" else 0)
            tp = tps[i % len(tps)]
            start = 5 if kind.cut_tokens else 4
            case = Case(
                (spec,), engine(spec, src, a, tp[0], tokens, 1), engine(spec, dst, b, tp[1], tokens, 9), start, tokens
            )
            check(case, limit=(7, 10**9, 40, 200)[i])
