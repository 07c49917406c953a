"""The kernels under Triton's interpreter, on host memory: run by ``test_kernels.py`` in a process of its own, since
what Triton decorates stays interpreted. Covers the arithmetic; that compiled code does it too is for ``tests/gpu``."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvxfer import memory
from kvxfer.geometry import CopyPattern, CopyPlan, StridedCopy
from kvxfer.memory.cuda import CudaSpace, launch
from kvxfer.memory.indexed import move_indexed
from kvxfer.memory.space import Space
from tests.geometry.engines import Case, cases
from tests.geometry.layouts import KINDS, Spec, Store
from tests.geometry.test_law import links, plan
from tests.geometry.test_pairs import engine
from tests.memory.test_cpu import filled

# Not shrunk: under the interpreter that outlasts the time that ``test_kernels.py`` gives this file.
SOME = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def whole(made: CopyPlan) -> list[CopyPlan]:
    return [made]


def thirds(made: CopyPlan) -> list[CopyPlan]:
    """As staged parts are cut."""
    return list(made.split(max(64, made.nbytes // 3)))


def places(pieces: list[CopyPlan], at: int) -> list[tuple[CopyPlan, int]]:
    """Pieces one after the other from ``at``, in an order in which nobody should have to move them."""
    ends = np.cumsum([at, *(piece.nbytes for piece in pieces)]).tolist()
    return list(zip(pieces, ends, strict=False))[::-1]


def by_kernel(space: memory.Space, pieces: list[CopyPlan], side: memory.Side, staged: memory.Space, at: int) -> None:
    launcher = launch.Launcher(space, processors=6)
    for piece, begin in places(pieces, at):
        launcher.move(piece, side, staged.region.address + begin, pack=side == "source")


def by_index(space: memory.Space, pieces: list[CopyPlan], side: memory.Side, staged: memory.Space, at: int) -> None:
    def held(region: int) -> torch.Tensor:
        return torch.from_numpy(space.memory(region))

    for piece, begin in places(pieces, at):
        stream = torch.from_numpy(staged.bytes(begin, piece.nbytes))
        move_indexed(space, piece, side, stream, held, pack=side == "source")


def check(move, case: Case, at: int, cut=whole) -> None:  # type: ignore[no-untyped-def]
    """Each piece that numpy packs is packed alike by ``move``, and all unpacked by it are where they belong."""
    case.fill()
    after = {c: case.expect(s)[0] for c, s in case.consumer.stores.items()}
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        if not made.nbytes:
            continue
        source = memory.space(case.producer.stores[p].cache.regions)
        sink = memory.space(case.consumer.stores[c].cache.regions)
        one, other = filled(made.nbytes + 40), filled(made.nbytes + 40)
        pieces = cut(made)
        for piece, begin in places(pieces, at):
            source.pack(piece, one, begin)
        move(source, pieces, "source", other, at)
        assert np.array_equal(one.bytes(0, one.nbytes), other.bytes(0, other.nbytes))
        move(sink, pieces, "destination", other, at)
    for c, image in after.items():
        assert np.array_equal(case.consumer.stores[c].image, image)


@pytest.mark.parametrize(("move", "cut"), [(by_kernel, whole), (by_kernel, thirds), (by_index, whole)])
def test_any_layout(move, cut) -> None:  # type: ignore[no-untyped-def]
    @SOME
    @given(cases(), st.integers(0, 17))
    def law(case: Case, at: int) -> None:
        check(move, case, at, cut)

    law()


@pytest.mark.parametrize("move", [by_kernel, by_index])
@pytest.mark.parametrize("size", [16, 8, 24, 4, 2, 3])
def test_any_alignment(move, size: int) -> None:  # type: ignore[no-untyped-def]
    """Every word size that the kernels know, and content that does not fill a tile."""
    spec = Spec(KINDS[0], ("l0", "l1"), (size, size), 2)
    for src, dst in (("nhd", "hnd"), ("fa", "bhlnc"), ("padded heads", "nhd")):
        check(move, Case((spec,), engine(spec, src, 4, 1, 10, 1), engine(spec, dst, 6, 1, 10, 2), 0, 10), size)


def test_long_rows_are_cut_into_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_SPAN", 64)
    monkeypatch.setattr(launch, "_TILE", 4)
    spec = Spec(KINDS[0], ("l0", "l1", "l2"), (16, 16), 2)
    for n in (4, 5):
        sides = engine(spec, "blhnc", 4, 1, 18, 1), engine(spec, "blhnc", n, 1, 18, 2)
        check(by_kernel, Case((spec,), *sides, 0, 18), 32)


def test_an_empty_launch_moves_nothing() -> None:
    cache, staged = filled(8192, 1), filled(8192, 2)
    before = [cache.bytes(0, 8192).copy(), staged.bytes(0, 8192).copy()]
    at = np.array([0])
    made = CopyPlan(
        (
            StridedCopy(
                CopyPattern(np.array([0, 4096]), np.array([0, 4096]), ((2, 64, 64),), 64), at, at, np.ones(1, np.int64)
            ),
        )
    )
    for side in ("source", "destination"):
        launcher = launch.Launcher(cache, processors=6)
        launcher.rehearse(launcher.prepare(made, side, pack=side == "source"), staged.region.address)  # type: ignore[arg-type]
    assert [np.array_equal(m.bytes(0, 8192), b) for m, b in zip((cache, staged), before, strict=True)] == [True, True]


class OnHost(CudaSpace):
    """The space of a device, with its kernels interpreted on host memory."""

    def __init__(self, memory: memory.Space) -> None:
        Space.__init__(self, memory.regions, "cpu")
        self._device = torch.device("cpu")
        self._launcher = launch.Launcher(self, processors=6)


def test_a_space_is_ready_when_it_has_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    cache, staged = filled(8192), filled(8192)
    cache.bytes(0, 8192)[:] = np.random.default_rng(0).integers(0, 255, 8192)
    space, before = OnHost(cache), cache.bytes(0, 8192).copy()
    at = np.array([1024])
    made = CopyPlan(
        (StridedCopy(CopyPattern(np.array([0, 2048]), np.array([0, 4096]), (), 512), at, at, np.ones(1, np.int64)),)
    )
    launched, start = [], space._launcher._start

    def noted(*args, empty: bool = False, **kwargs):  # type: ignore[no-untyped-def]
        launched.append(empty)
        return start(*args, empty=empty, **kwargs)

    monkeypatch.setattr(space._launcher, "_start", noted)
    unpack = space.prepare_unpack(made, staged)
    assert np.array_equal(cache.bytes(0, 8192), before)
    assert space.pack(made, staged, 64).passed()
    assert np.array_equal(staged.bytes(64, 1024), np.concatenate([before[1024:1536], before[3072:3584]]))
    assert unpack(64).passed()
    assert np.array_equal(cache.bytes(5120, 512), before[3072:3584])
    monkeypatch.setattr(launch, "QUICK_S", 3600.0)
    cache.bytes(4096, 4096)[:] = 0
    unpack = space.prepare_unpack(made, staged)  # it has just run
    assert not cache.bytes(4096, 4096).any()
    assert unpack(64).passed()
    assert np.array_equal(cache.bytes(5120, 512), before[3072:3584])
    assert launched == [True, False, False, False]


def test_a_plan_that_leaves_the_memory_is_refused() -> None:
    cache, staged = filled(8192), filled(8192)
    pattern = CopyPattern(np.array([0, 4096]), np.array([0, 4096]), ((2, 64, 64),), 64)
    for place, good in ((0, True), (4096 - 128, True), (4096 - 64, False), (-64, False)):
        at = np.array([place])
        made = CopyPlan((StridedCopy(pattern, at, at, np.ones(1, np.int64)),))
        for side in ("source", "destination"):
            if good:
                by_kernel(cache, [made], side, staged, 0)
            else:
                with pytest.raises(ValueError, match="leaves the regions"):
                    by_kernel(cache, [made], side, staged, 0)


def digest(store: Store, made: CopyPlan, side: memory.Side) -> int:
    launcher, out = launch.Launcher(memory.space(store.cache.regions), processors=6), torch.zeros(1, dtype=torch.int64)
    for part in made.logical:
        for launch_one in launcher.digests(part, side, out):
            launch_one()
    return int(out.item()) % (1 << 64)


def agree(case: Case) -> None:
    case.fill()
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        source = case.producer.stores[p]
        assert digest(source, made, "source") == memory.space(source.cache.regions).checksum(made, "source").value


@SOME
@given(cases())
def test_the_checksum_is_that_of_the_host(case: Case) -> None:
    agree(case)


@pytest.mark.parametrize("size", [64, 8, 20])
def test_the_checksum_of_units_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_HASHED", 8)
    monkeypatch.setattr(launch, "_HASHED_WORDS", 4)
    spec = Spec(KINDS[0], ("l0", "l1"), (size, size), 2)
    for src in ("nhd", "fa", "hnd"):
        agree(Case((spec,), engine(spec, src, 4, 1, 10, 1), engine(spec, "hnd", 6, 1, 10, 2), 3, 10))
