"""What a producer that is killed leaves in use on its GPU, while the consumer that read from it lives on.

With ``-s`` this prints, for each back end: MiB in use on both GPUs after each death, and milliseconds that a fetch takes beside an idle
and a busy GPU of the consumer's.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.testing.remote import Remote
from kvxfer_bench.transfer.engine import BenchEngine
from kvxfer_bench.transfer.shapes import MODELS, Request
from tests.conftest import require

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpus, pytest.mark.timeout(240)]

DEATHS, FETCHES, STAGING = 4, 14, 512 << 20
UNMAPS: dict[str, Any] = {"ucx": {"CUDA_IPC_CACHE": "n"}}
"""With this UCX keeps the memory of the first peer only. By default it keeps that of all: its issue 11753."""


class BusyEngine(BenchEngine):
    """An engine whose GPU may have other work."""

    def work(self, on: bool) -> None:
        """Begin or stop to multiply matrices, some 15 ms of it ahead at any time."""
        self._working = on
        if on:
            threading.Thread(target=self._multiply, daemon=True).start()

    def _multiply(self) -> None:
        device = self._pool.device
        x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        y, ahead, stream = torch.empty_like(x), [], torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            while self._working:
                for _ in range(4):
                    torch.matmul(x, x, out=y)
                ahead.append(stream.record_event())
                if len(ahead) > 3:
                    ahead.pop(0).synchronize()


def in_use() -> list[int]:
    return [(total - free) >> 20 for free, total in (torch.cuda.mem_get_info(gpu) for gpu in (0, 1))]


@pytest.mark.parametrize(
    ("backend", "options", "first_kept", "keeps"),
    [
        ("cuda_ipc", {}, 0, False),
        ("nccl", {}, 0, False),
        pytest.param("ucx", UNMAPS, 1, False, marks=pytest.mark.slow),
        pytest.param("nixl", UNMAPS, 1, False, marks=pytest.mark.slow),
        pytest.param("ucx", {}, 0, True, marks=pytest.mark.slow),
        pytest.param("nixl", {}, 0, True, marks=pytest.mark.slow),
    ],
    ids=["cuda_ipc", "nccl", "ucx that unmaps", "nixl that unmaps", "ucx", "nixl"],
)
def test_memory_of_killed_producers(backend: str, options: dict[str, Any], first_kept: int, keeps: bool) -> None:
    require(backend)
    config = Config(backend=backend, backend_options=options, staging_bytes=STAGING)
    model = MODELS["llama-3-8b"]
    request = Request(model, 1024)
    with ExitStack() as engines:

        def engine(role: Any, device: str) -> Remote:
            made = Remote(role, BusyEngine, role, config, model, request.blocks, device)
            engines.callback(made.close)
            return made

        consumer, producer = engine("consumer", "cuda:1"), engine("producer", "cuda:0")
        consumer("open_agent", "off")
        numbers = iter(range(1, 1 << 20))

        def fetches(count: int) -> list[float]:
            out = []
            for number in [next(numbers) for _ in range(count)]:
                producer("offer", [number], request.src)
                time.sleep(0.01)  # what has rested is slow, in every round alike
                [row] = consumer("fetch", [number], request.dst, {"off": source})
                out.append(1e3 * float(row["off"]["fetch_s"]))
            return out

        used = []
        for _ in range(DEATHS):
            source = producer("open_agent", "off")
            fetches(3)
            successor = engine("producer", "cuda:0")
            successor.wait()
            producer.kill()
            time.sleep(2.0)
            used.append(in_use())
            producer = successor
        source = producer("open_agent", "off")
        took = {}
        for busy in (False, True):
            consumer("work", busy)
            time.sleep(0.3)
            took[busy] = statistics.median(fetches(FETCHES)[2:])
        consumer("work", False)
    print(
        f"\n{backend} {options}: {used} MiB; a fetch takes {took[False]:.2f} ms, beside other work {took[True]:.2f} ms"
    )
    grown = used[-1][0] - used[first_kept][0]
    if keeps:
        assert grown > 0, "UCX gives it back now: the pages say that it does not"
    else:
        assert grown < 32, used
