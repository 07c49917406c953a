"""Around a load CUDA memory is cleared as host memory is, before the call returns and whatever the main stream does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.geometry.engines import Case, cases

torch = pytest.importorskip("torch")

from kvxfer_vllm.copying import Clearing  # noqa: E402  (needs torch)

pytestmark = pytest.mark.gpu


class Moved:
    """A store's memory in a storage for each region, on any device."""

    def __init__(self, store: Any, device: str) -> None:
        import msgspec

        from kvxfer.geometry import Region

        self.tensors, regions = [], []
        for start, r in zip(store.cache.starts, store.cache.regions, strict=True):
            self.tensors.append(torch.from_numpy(store.image[start : start + r.nbytes].copy()).to(device))
            regions.append(Region(self.tensors[-1].data_ptr(), r.nbytes, device))
        self.cache = msgspec.structs.replace(store.cache, regions=tuple(regions))

    def bytes(self) -> list[np.ndarray]:
        return [t.cpu().numpy() for t in self.tensors]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_as_on_the_host(case: Case) -> None:
    for store in case.consumer.stores.values():
        if not store.cache.regions:
            continue
        both = [Moved(store, device) for device in ("cpu", "cuda:0")]
        for m in both:
            Clearing(m.tensors, m.cache).before(case.consumer.tables, case.start, case.tokens)
        for host, device in zip(*(m.bytes() for m in both), strict=True):
            assert np.array_equal(host, device)


def test_it_is_done_when_the_call_returns_though_the_main_stream_is_busy() -> None:
    from kvxfer.geometry import Cache, Group, Region, View

    memory = torch.full((4, 8, 16, 64), 7, dtype=torch.uint8, device="cuda:0")
    layers = tuple(f"l{i}" for i in range(4))
    view = View("kv", 0, layers, tuple(i * 8192 for i in range(4)), 8, 1024, 64, "x", None, 64)
    clearing = Clearing([memory], Cache((Region(memory.data_ptr(), memory.nbytes, "cuda:0"),), (Group(16),), (view,)))
    clearing.before([np.array([0])], 0, 10)  # what is made once is made
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of clock cycles
    done = torch.cuda.Event()
    done.record()
    clearing.before([np.array([3, 5])], 0, 20)
    assert not done.query(), "it waited for the main stream, which a forward pass may keep busy"
    with torch.cuda.stream(torch.cuda.Stream()):
        seen = memory.cpu()
    assert not seen[:, 5, 4:].any() and (seen[:, 5, :4] == 7).all() and (seen[:, 3] == 7).all()
