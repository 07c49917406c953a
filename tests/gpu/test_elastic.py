"""An elastic cache in a GPU's memory: pages mapped and unmapped by the driver while blocks move, as kvcached does.

Both engines have a process of their own, and a GPU where there are two. Run with ``-s`` to see what was found."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvxfer import memory
from kvxfer.errors import KvxferError
from kvxfer.geometry import Region
from kvxfer.memory import with_elastic
from tests.conftest import require
from tests.data.elastic_cache import LAYOUTS, ROWS_A_PAGE
from tests.data.elastic_engine import Setup, Two, two_here

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.driver")

from tests.gpu.cuda_pages import PAGE, CudaPages, ExpandableSegments, Exported, KvcachedPages  # noqa: E402  (only where CUDA is)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

BACKENDS = [
    "cuda_ipc",
    "nixl",
    "ucx",
    pytest.param("zmq", marks=pytest.mark.slow),
    pytest.param("nccl", marks=pytest.mark.gpus),
]
TRANSFERS = 60
DEVICES = "cuda:0", f"cuda:{int(torch.cuda.device_count() > 1)}"
MIXED = [each if len(set(each)) > 1 else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]


def two(
    backend: str,
    layouts: Any = ("contiguous", "contiguous"),
    elastic: bool | None = None,
    row: int = PAGE // ROWS_A_PAGE,
    pages: Callable[..., Any] = CudaPages,
) -> Two:
    made = [
        Setup(backend, layout, elastic, row, pages=partial(pages, device=device))
        for layout, device in zip(layouts, DEVICES, strict=True)
    ]
    return Two(*made)


@pytest.mark.parametrize("layouts", MIXED, ids="-".join)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_come_and_go_under_load(backend: str, layouts: Any) -> None:
    """Nobody has said that the caches are elastic: it is found out."""
    require(backend)
    with closing(two(backend, layouts)) as engines:
        assert engines.move(TRANSFERS) == {"right": TRANSFERS}
        assert engines.staged


@pytest.mark.parametrize("backend", BACKENDS)
def test_expandable_segments(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """What PyTorch maps by pages is found out as well, and its staging memory keeps its pages all the same."""
    require(backend)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with closing(two(backend, pages=ExpandableSegments)) as engines:
        assert engines.move(TRANSFERS) == {"right": TRANSFERS}
        assert engines.staged


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_kvcached_maps_and_unmaps(backend: str) -> None:
    """By its own allocator, from one of the layouts that its patches lay over that into the other."""
    require(backend)
    if importlib.util.find_spec("kvcached") is None:
        pytest.skip("kvcached is not installed")
    with closing(two(backend, ("contiguous", "apart"), pages=KvcachedPages)) as engines:
        assert engines.move(TRANSFERS) == {"right": TRANSFERS}
        assert engines.staged


@pytest.mark.slow
@pytest.mark.parametrize("exported", ["none", "posix", "fabric"])
@pytest.mark.parametrize("backend", ["nixl", "ucx"])
def test_forced_to_register_it(backend: str, exported: Exported) -> None:
    """What a library makes of pages that it registers once is its own affair, and is told in docs/elastic-caches.md.

    Ours is that it ends, one way or another, and that nothing was staged: then the finding is about registration.
    """
    require(backend)
    if exported == "fabric" and not _has_fabric():
        pytest.skip("this machine has no fabric handles")
    try:
        with closing(two(backend, elastic=False, row=PAGE, pages=partial(CudaPages, exported=exported))) as engines:
            found: dict[str, Any] = dict(engines.move(100))
            assert not engines.staged
    except KvxferError as error:
        found = {"refused or failed": str(error)}
    print(f"FOUND {backend}, forced to register pages with handles {exported}: {found}")


def test_a_kept_registration_is_caught() -> None:
    """What these tests are for. In one process: there ``nixl`` reaches all memory by its addresses."""
    require("nixl")
    with closing(
        two_here("tests.gpu.keeps_pages:KeepsPages", elastic=(None, None), row=PAGE, pages=CudaPages)
    ) as engines:
        assert engines.move(40)["wrong"]
        assert not engines.staged


@pytest.mark.parametrize("exported", ["none", "posix"])
def test_a_back_end_that_exports_allocations_refuses_it(exported: Exported) -> None:
    require("cuda_ipc")
    with pytest.raises(KvxferError, match="cannot be shared"):
        two("cuda_ipc", elastic=False, pages=partial(CudaPages, exported=exported))


def test_it_is_found_out() -> None:
    mapped, plain = CudaPages(16, 0), torch.zeros(4096, dtype=torch.uint8, device="cuda:0")
    regions = [Region(mapped.address, PAGE, "cuda:0"), Region(plain.data_ptr(), 4096, "cuda:0")]
    assert [r.elastic for r in with_elastic(regions)] == [True, False]
    assert [r.elastic for r in with_elastic(regions, False)] == [False, False]
    staging = memory.allocate(1 << 20, "cuda:0")
    assert not with_elastic(staging.regions)[0].elastic
    mapped.close()


def test_staging_keeps_its_pages_where_tensors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch gives may be mapped by pages, with expandable segments; staging memory is then the driver's."""
    from kvxfer.memory.cuda import space

    answers = iter([True, False])
    monkeypatch.setattr(space, "is_mapped", lambda address: next(answers))
    staging = memory.allocate(1 << 20, "cuda:0")
    assert not with_elastic(staging.regions)[0].elastic
    assert not np.any(space.wrap(staging.region.address, 1 << 20, "cuda:0").cpu().numpy())


def _has_fabric() -> bool:
    try:
        CudaPages(1, 0, exported="fabric").close()
    except AssertionError:
        return False
    return True
