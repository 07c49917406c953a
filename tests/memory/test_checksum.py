"""The checksum against its definition, its independence of layout and sharding, and what it detects."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer import memory
from kvxfer.geometry import CopyPlan, Planner, Rank
from kvxfer.memory import rows
from tests.geometry.engines import Case, cases
from tests.geometry.layouts import KINDS, Spec, Store
from tests.geometry.test_law import links, plan
from tests.geometry.test_pairs import copy, engine

LAW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
ALL = (1 << 64) - 1
HEAD, TOKEN, LENGTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93


@pytest.fixture(params=[rows.by_numpy, rows.by_numba], ids=["numpy", "numba"], autouse=True)
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numba and as if there were none."""
    monkeypatch.setattr(rows, "best", lambda: request.param)


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ALL
    return x ^ x >> 31


def value(plane: str, layer: str, head: int, token: int, content: bytes) -> int:
    """What one unit adds, as the module's docstring defines it."""
    digest = 0
    for i in range(0, len(content), 4):
        digest += int.from_bytes(content[i : i + 4], "little") * (mix((i // 4 + 1) * HEAD & ALL) | 1)
    name = f"{len(plane)}:{plane}{layer}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") + head * HEAD + token * TOKEN
    return mix(((digest + len(content) * LENGTH) ^ key) & ALL)


def wanted(case: Case) -> int:
    """The sum over all that the consumers want, read in their memory by logical coordinates."""
    total = 0
    for store in case.consumer.stores.values():
        for g, layer, plane, t, cell, key in case.pieces(store, case.consumer.tables, case.start):
            if case.has(g, t):
                kind, n = case.specs[g].kind, case.block_tokens(case.consumer, g)
                # An opaque block counts from its first token, a state after its last.
                token = t if kind.cut_tokens else t + 1 if kind.group == "state" else t // n * n
                total += value(plane, layer, key[0], token, cell.tobytes())
    return total & ALL


@LAW
@given(cases())
def test_both_sides_agree_with_the_definition(case: Case) -> None:
    case.fill()
    sent = received = 0
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        source, sink = case.producer.stores[p], case.consumer.stores[c]
        copy(made, source.image, sink.image)
        one = memory.space(source.cache.regions).checksum(made, "source")
        other = memory.space(sink.cache.regions).checksum(made, "destination")
        assert one.fence.passed()
        assert one.value == other.value
        sent, received = sent + one.value, received + other.value
    assert sent & ALL == received & ALL == wanted(case)


@LAW
@given(st.data())
def test_increments_add_up(data: st.DataObject) -> None:
    case = data.draw(cases())
    if any(s.kind.group != "full" or not s.kind.cut_tokens for s in case.specs):
        return
    middle = data.draw(st.integers(case.start, case.tokens))
    for p, c, assignments in links(case):
        source = case.producer.stores[p]
        planner = Planner(source.cache, case.consumer.stores[c].cache, assignments)
        space, tables = memory.space(source.cache.regions), (case.producer.tables, case.consumer.tables)
        parts = [planner.plan(*tables, *span) for span in ((case.start, middle), (middle, case.tokens))]
        whole = space.checksum(planner.plan(*tables, case.start, case.tokens), "source").value
        assert sum(space.checksum(part, "source").value for part in parts) & ALL == whole
        assert space.checksum(parts[0] + parts[1], "source").value == whole


@pytest.fixture
def moved() -> tuple[Case, CopyPlan, Store]:
    spec = Spec(KINDS[0], ("l0", "l1"), (16, 16), 2)
    case = Case((spec,), engine(spec, "nhd", 4, 1, 12, 1), engine(spec, "hnd", 4, 1, 12, 2), 0, 12)
    case.fill()
    ((p, c, assignments),) = links(case)
    made = plan(case, p, c, assignments)
    copy(made, case.producer.stores[p].image, case.consumer.stores[c].image)
    return case, made, case.consumer.stores[Rank()]


def received(made: CopyPlan, store: Store) -> int:
    return memory.space(store.cache.regions).checksum(made, "destination").value


def test_every_segment_is_in_the_samples_of_some_transfers(moved: tuple[Case, CopyPlan, Store]) -> None:
    _, made, store = moved
    space = memory.space(store.cache.regions)
    samples = [memory.sample(made, seed) for seed in range(len(made.logical[0].token))]  # fewer than one in so many
    assert sum(space.checksum(one, "destination").value for one in samples) & ALL == received(made, store)


def test_a_plan_without_positions_has_no_checksum(moved: tuple[Case, CopyPlan, Store]) -> None:
    _, made, store = moved
    with pytest.raises(ValueError, match="does not know the positions"):
        memory.space(store.cache.regions).checksum(CopyPlan(made.copies), "destination")
    assert memory.space(store.cache.regions).checksum(CopyPlan(()), "destination").value == 0


def test_threads_agree_with_one(moved: tuple[Case, CopyPlan, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    _, made, store = moved
    good = received(made, store)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("kvxfer.memory.pool._WORTH", 16)
    assert received(made, store) == good


@LAW
@given(st.data())
def test_what_numba_compiles_does_what_numpy_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), "shape"))
    words, gap, n = (data.draw(st.integers(1, most), name) for name, most in (("words", 40), ("gap", 3), ("begins", 4)))
    strides, size = [], 4 * words
    for axis in data.draw(st.permutations(range(len(shape))), "from the inside out"):
        strides.append((axis, size))
        size *= shape[axis] + gap - 1
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    skip = data.draw(st.sampled_from([0, 4, 8]), "skip")
    content = rng.integers(0, 256, n * size + skip, dtype=np.uint8)
    begins = rng.permutation(n).astype(np.int64) * size + skip
    keys, first, factors = (rng.integers(0, 1 << 64, k, np.uint64) for k in (shape, n, words))
    these = rows.Rows(content, 4 * words, begins, shape, tuple(s for _, s in sorted(strides)), keys, first)
    assert these.aligned == (content.ctypes.data % 4 == 0)
    if these.aligned:
        one, other = (by(these, factors, np.uint64(7)) for by in (rows.by_numba, rows.by_numpy))
        assert one % (1 << 64) == other % (1 << 64)


def test_without_a_numba_that_works_numpy_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    rows.best.cache_clear()
    assert rows.best() is rows.by_numba
    rows.best.cache_clear()
    monkeypatch.setattr(rows, "_compiled", lambda: 1 / 0)
    assert rows.best() is rows.by_numpy and "does not work" in caplog.text
    rows.best.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert rows.best() is rows.by_numpy
    rows.best.cache_clear()
