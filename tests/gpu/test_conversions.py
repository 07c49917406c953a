"""Between engines whose caches differ in layout and block size, on GPUs, by agents: straight, and through staging memory."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended
from kvxfer.testing.engine import AgentEngine
from kvxfer.values import BlockTable, Fetch, Offer
from tests.conftest import require
from tests.geometry.engines import Case
from tests.geometry.layouts import KINDS, Spec
from tests.geometry.test_pairs import engine

torch = pytest.importorskip("torch")

from tests.gpu.device import OnDevice  # noqa: E402  (needs torch)

pytestmark = pytest.mark.gpu

TOKENS, START = 150, 7
T = TransferId("own/1/converted", 0)


@pytest.mark.parametrize(("backend", "staged"), [("cuda_ipc", 0), ("zmq", 1), ("nixl", 1), ("ucx", 1)])
@pytest.mark.parametrize(
    ("src", "dst", "there", "here"),
    [
        ("nhd", "hnd", 16, 16),
        ("hnd", "nhd", 16, 32),
        ("nhd", "nhd", 32, 64),
        ("nhd", "hnd", 64, 16),
        ("fi", "fa", 16, 64),
        ("fa", "hnd", 32, 16),
        ("blhnc", "fi", 24, 64),
    ],
)
def test_any_layout_and_block_size(backend: str, staged: int, src: str, dst: str, there: int, here: int) -> None:
    require(backend)
    convert(backend, staged, ("cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"), src, dst, there, here)


def convert(backend: str, staged: int, devices: tuple[str, str], src: str, dst: str, there: int, here: int) -> None:
    spec = Spec(KINDS[0], ("l0", "l1", "l2"), (64, 64), 4)
    case = Case((spec,), engine(spec, src, there, 1, TOKENS, 1), engine(spec, dst, here, 1, TOKENS, 2), START, TOKENS)
    case.fill()
    (producer,), (consumer,) = case.producer.stores.values(), case.consumer.stores.values()
    expected, _ = case.expect(consumer)
    source, sink = (OnDevice(store, device) for store, device in zip((producer, consumer), devices, strict=True))
    config = Config.from_mapping({"backend": backend, "transfer_timeout": 60.0})
    with AgentEngine(config, caches=[source.cache]) as p, AgentEngine(config, caches=[sink.cache]) as d:
        p.agents[0].offer(Offer(T, b"d", 1, TOKENS, BlockTable.of(case.producer.tables), True))
        d.agents[0].fetch(Fetch("r", T, b"d", p.source, BlockTable.of(case.consumer.tables), START, TOKENS))
        (end,) = d.wait(Ended, timeout=70.0)
        assert end.outcome.delivered, end
        stats = d.agents[0].stats()
        assert (stats.direct, stats.staged) == (1 - staged, staged)
        assert np.array_equal(sink.bytes(), expected)
