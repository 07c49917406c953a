"""Packing, unpacking and checksums in CUDA memory, with compiled kernels, against numpy on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer import memory
from kvxfer.geometry import CopyPlan
from kvxfer.memory.space import HostSpace
from tests.geometry.engines import Case, cases
from tests.geometry.layouts import KINDS, Kind, Spec
from tests.geometry.test_law import links, plan
from tests.geometry.test_pairs import engine

torch = pytest.importorskip("torch")

from tests.gpu.device import OnDevice  # noqa: E402  (needs torch)

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


def wait(fence: memory.Fence) -> None:
    fence.event.synchronize()
    assert fence.passed()


def staging(nbytes: int, where: str) -> memory.Space:
    return memory.allocate(nbytes, "cpu" if where == "pinned" else DEVICE, beside=DEVICE)


def content(space: memory.Space) -> np.ndarray:
    if isinstance(space, HostSpace):
        return space.bytes(0, space.nbytes)
    torch.cuda.synchronize()
    return space.region.owner.cpu().numpy()


def check(case: Case, at: int, where: str) -> None:
    case.fill()
    after = {c: case.expect(s)[0] for c, s in case.consumer.stores.items()}
    sources = {p: OnDevice(s, DEVICE) for p, s in case.producer.stores.items()}
    sinks = {c: OnDevice(s, DEVICE) for c, s in case.consumer.stores.items()}
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        if not made.nbytes:
            continue
        host = memory.allocate(made.nbytes + at + 16)
        memory.space(case.producer.stores[p].cache.regions).pack(made, host, at)
        staged = staging(made.nbytes + at + 16, where)
        wait(sources[p].space.pack(made, staged, at))
        assert np.array_equal(content(staged), content(host))
        wait(sinks[c].space.unpack(made, staged, at))
    for c, image in after.items():
        assert np.array_equal(sinks[c].bytes(), image)


@pytest.mark.parametrize(
    ("kind", "src"), [(k, s) for k in KINDS for s in k.layouts], ids=lambda x: getattr(x, "name", x)
)
@pytest.mark.parametrize("where", ["device", "pinned"])
def test_any_layout_into_any_layout(kind: Kind, src: str, where: str) -> None:
    for i, dst in enumerate(kind.layouts):
        size = (16, 8, 24, 6)[i % 4]
        spec = Spec(kind, ("l0", "l1", "l2"), (size,) * len(kind.planes), 2, 50 if kind.group == "window" else 0)
        n, start = (6, 5) if kind.cut_tokens else (4, 4)
        tp = (1, 2) if kind.cut_heads and i % 2 else (1, 1)
        case = Case((spec,), engine(spec, src, 4, tp[0], 13, 1), engine(spec, dst, n, tp[1], 13, 2), start, 13)
        check(case, (0, 16, 7)[i % 3], where)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.memory.cuda import CudaSpace

    made = CudaSpace.__init__

    def without(self: CudaSpace, *args: Any) -> None:
        made(self, *args)
        self._launcher = None

    monkeypatch.setattr(CudaSpace, "__init__", without)
    spec = Spec(KINDS[0], ("l0", "l1", "l2"), (16, 16), 2)
    for src, dst in (("nhd", "hnd"), ("fa", "bhlnc"), ("padded heads", "fi")):
        check(Case((spec,), engine(spec, src, 4, 1, 13, 1), engine(spec, dst, 6, 2, 13, 2), 3, 13), 16, "device")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(0, 17))
def test_the_law(case: Case, at: int) -> None:
    check(case, at, "device")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_the_checksum_is_that_of_the_host(case: Case) -> None:
    case.fill()
    for p, c, assignments in links(case):
        made = plan(case, p, c, assignments)
        store = case.producer.stores[p]
        if store.cache.regions:
            found = OnDevice(store, DEVICE).space.checksum(made, "source")
            assert found.value == memory.space(store.cache.regions).checksum(made, "source").value
            assert found.fence.passed()


@pytest.mark.parametrize("size", [256, 576, 16, 8, 20])
def test_the_checksum_of_units_of_any_size(size: int) -> None:
    spec = Spec(KINDS[0], ("l0", "l1"), (size, size), 2)
    case = Case((spec,), engine(spec, "nhd", 4, 1, 33, 1), engine(spec, "hnd", 6, 1, 33, 2), 3, 33)
    case.fill()
    ((p, c, assignments),) = links(case)
    made = plan(case, p, c, assignments)
    store = case.producer.stores[p]
    want = memory.space(store.cache.regions).checksum(made, "source").value
    assert OnDevice(store, DEVICE).space.checksum(made, "source").value == want


def large() -> tuple[Case, CopyPlan]:
    """Five megabytes in rows of 512 bytes, scattered."""
    spec = Spec(KINDS[0], tuple(f"l{i}" for i in range(4)), (256, 256), 8)
    case = Case((spec,), engine(spec, "nhd", 16, 1, 320, 1), engine(spec, "hnd", 16, 1, 320, 2), 0, 320)
    ((p, c, assignments),) = links(case)
    return case, plan(case, p, c, assignments)


def test_work_waits_for_its_fence() -> None:
    """The model is still writing when packing is asked for."""
    case, made = large()
    (store,) = case.producer.stores.values()
    source, staged = OnDevice(store, DEVICE), staging(made.nbytes, "device")
    wait(source.space.pack(made, staged))  # compiles
    torch.cuda._sleep(200_000_000)
    source.image.fill_(0x5A)
    after = memory.fence(DEVICE)
    done = source.space.pack(made, staged, 0, after)
    assert not after.passed() and not done.passed(), "packing did not overlap the model, or the host waited"
    wait(done)
    assert (content(staged) == 0x5A).all()


def test_packing_into_memory_that_the_device_cannot_see_is_refused() -> None:
    case, made = large()
    (store,) = case.producer.stores.values()
    with pytest.raises(ValueError, match="pinned host memory only"):
        OnDevice(store, DEVICE).space.pack(made, memory.allocate(made.nbytes))
    with pytest.raises(ValueError, match="lie in no region"):
        OnDevice(store, DEVICE).space.pack(made, staging(made.nbytes, "device"), 1)


def test_device_memory_does_not_grow() -> None:
    case, made = large()
    (store,) = case.producer.stores.values()
    source, staged = OnDevice(store, DEVICE), staging(made.nbytes, "device")
    used = []
    for _ in range(60):
        wait(source.space.pack(made, staged))
        source.space.checksum(made, "source").value  # noqa: B018  (waits)
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[10] + (1 << 20)
