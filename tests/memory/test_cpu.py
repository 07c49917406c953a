"""Packing and unpacking host memory: the stream is what the plan says, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer import memory
from kvxfer.errors import KvxferError
from kvxfer.geometry import CopyPattern, CopyPlan, Region, StridedCopy
from tests.geometry.engines import Case, cases
from tests.geometry.test_law import links, plan, rows

LAW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def filled(nbytes: int, value: int = 0xA5) -> memory.Space:
    space = memory.allocate(nbytes)
    space.bytes(0, nbytes)[:] = value
    return space


@LAW
@given(cases(), st.integers(0, 9))
def test_packed_then_unpacked_is_moved(case: Case, at: int) -> None:
    case.fill()
    after = {c: case.expect(s)[0] for c, s in case.consumer.stores.items()}
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        if not made.nbytes:
            continue
        source, sink = case.producer.stores[p], case.consumer.stores[c]
        staged = filled(made.nbytes + 20)
        assert memory.space(source.cache.regions).pack(made, staged, at).passed()
        stream = staged.bytes(0, staged.nbytes).copy()
        for begin, src, _, n in rows(made):
            assert np.array_equal(stream[at + begin : at + begin + n], source.image[src : src + n])
        assert (stream[:at] == 0xA5).all() and (stream[at + made.nbytes :] == 0xA5).all()
        assert memory.space(sink.cache.regions).unpack(made, staged, at).passed()
        assert np.array_equal(staged.bytes(0, staged.nbytes), stream)
    for c, image in after.items():
        assert np.array_equal(case.consumer.stores[c].image, image)


def scattered(blocks: int, rows: int, unit: int, count: int, seed: int = 0) -> CopyPlan:
    """``count`` of ``blocks`` blocks of ``rows`` rows, in any order on both sides, rows swapped end for end."""
    rng = np.random.default_rng(seed)
    at = np.arange(rows, dtype=np.int64) * unit
    pattern = CopyPattern(at, at[::-1].copy(), (), unit)
    src, dst = (rng.permutation(blocks)[:count].astype(np.int64) * rows * unit for _ in "sd")
    return CopyPlan((StridedCopy(pattern, src, dst, np.ones(count, np.int64)),))


@pytest.mark.parametrize(("unit", "rows"), [(256, 512), (4096, 32), (100, 1024)])
def test_large_plans_are_shared_between_threads(unit: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    made, page = scattered(90, rows, unit, 64), rows * unit
    cache, staged = filled(90 * page), filled(made.nbytes)
    content = cache.bytes(0, cache.nbytes)
    content[:] = np.random.default_rng(1).integers(0, 256, cache.nbytes, dtype=np.uint8)
    cache.pack(made, staged)
    stream = staged.bytes(0, staged.nbytes)
    blocks = content.reshape(90, rows, unit)
    (strided,) = made.copies
    picked, order = strided.src_at // page, strided.src_rows // unit  # these run against the source
    assert np.array_equal(stream.reshape(64, rows, unit), blocks[picked][:, order])
    target = filled(90 * page, 0)
    target.unpack(made, staged)
    want = np.zeros_like(blocks)
    want[strided.dst_at // page] = blocks[picked][:, order][:, np.argsort(strided.dst_rows // unit)]
    assert np.array_equal(target.bytes(0, target.nbytes).reshape(want.shape), want)
    assert any(t.name.startswith("kvxfer-copy") for t in threading.enumerate())


def test_a_plan_that_leaves_the_memory_is_refused_wherever_it_does() -> None:
    cache, staged = filled(1 << 16), filled(1 << 16)
    outside = CopyPattern(np.zeros(1, np.int64), np.zeros(1, np.int64), (), 4096)
    for at in (-1, (1 << 16) - 4095, 1 << 40):
        bad = CopyPlan((StridedCopy(outside, *(np.array([0, at]) for _ in "sd"), np.ones(2, np.int64)),))
        with pytest.raises((ValueError, TypeError)):
            cache.pack(bad, staged)
        with pytest.raises((ValueError, TypeError)):
            cache.unpack(bad, staged)
    good = CopyPlan((StridedCopy(outside, *(np.array([0]) for _ in "sd"), np.ones(1, np.int64)),))
    for at in (-1, (1 << 16) - 4095):
        with pytest.raises(ValueError, match="lie in no region"):
            cache.pack(good, staged, at)


class Unpassed:
    event = None

    def passed(self) -> bool:
        return False


def test_host_memory_does_not_wait_for_fences() -> None:
    cache, staged = filled(8192), filled(8192)
    made = scattered(2, 4, 8, 1)
    for call in (cache.pack, cache.unpack):
        call(made, staged, 0, memory.Done())
        with pytest.raises(ValueError, match="cannot wait for a fence"):
            call(made, staged, 0, Unpassed())
    assert memory.fence("cpu").passed()


def test_spaces_of_many_regions_are_flat() -> None:
    one, two = filled(100, 1), filled(50, 2)
    space = memory.space((one.region, two.region))
    assert space.starts == (0, 8192)
    assert space.bytes(8192, 50).sum() == 100
    for at, n in ((99, 2), (100, 1), (8192, 51), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="lie in no region"):
            space.bytes(at, n)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: memory.allocate(0), "nbytes must be at least 1, not 0"),
        (lambda: memory.allocate(9, "tpu"), "'tpu' is not known"),
        (lambda: memory.space((Region(1, 1), Region(9, 1, "cuda:0"))), "one device"),
        (lambda: memory.space((Region(1, 1, "tpu"),)), "'tpu' is not known"),
    ],
)
def test_what_cannot_be_memory(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 62])
def test_memory_that_the_system_has_not_is_told_in_words(nbytes: int) -> None:
    with pytest.raises(KvxferError, match=f"cannot allocate {nbytes} bytes of staging for cpu"):
        memory.allocate(nbytes)


def test_host_memory_needs_no_torch() -> None:
    code = (
        "import sys, kvxfer.memory as m; s = m.space(m.allocate(64).regions); m.fence('cpu');"
        "assert not {'torch', 'triton'} & set(sys.modules), 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
