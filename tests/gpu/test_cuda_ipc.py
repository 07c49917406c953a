"""The cuda_ipc back end on GPUs: between processes, between GPUs, and within one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import Region, Runs
from kvxfer.memory import fence
from kvxfer.memory.cuda.space import wrap
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import Suite, TransferMode, World
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.deaths import Deaths
from kvxfer.testing.conformance.transfers import LAYOUTS, Transfers
from kvxfer.transport import Verb
from tests.backends.cuda_plans import PAIRS, move_plans
from tests.gpu.device import used

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from kvxfer_cuda_ipc import CudaIpcTransport  # noqa: E402  (only where it can be used)

pytestmark = pytest.mark.gpu


class TestKernel(ConformanceSuite):
    """Participants spread over the GPUs there are; those that are killed or stopped are processes of their own."""

    backend = CudaIpcTransport
    memory = "cuda"
    revokes = False


@pytest.mark.slow
class TestCopyEngines(Transfers):
    backend = CudaIpcTransport
    memory = "cuda"
    options: ClassVar[dict[str, Any]] = {"engine": "copy"}


class OneGpu(World):
    def _device(self) -> str:
        return "cuda:0"


@pytest.mark.gpus
class TestOnOneGpu(Deaths):
    """Two processes that share a GPU, where there is another."""

    backend = CudaIpcTransport
    memory = "cuda"

    @pytest.fixture
    def world(self) -> Iterator[World]:
        world = OneGpu(self)
        yield world
        world.close()


class Ours(Suite):
    backend = CudaIpcTransport
    memory = "cuda"
    __test__ = False


@pytest.fixture(params=[World, pytest.param(OneGpu, marks=pytest.mark.gpus)], ids=["spread", "one GPU"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = request.param(Ours())
    yield world
    world.close()


def test_all_layouts_between_processes(world: World) -> None:
    a, b = world.local(), world.process("other")
    world.allocate(a, b)
    link = world.link(a, b)
    for runs in LAYOUTS.values():
        for way in (TransferMode.READ, TransferMode.WRITE):
            source, target = (b, a) if way is TransferMode.READ else (a, b)
            world.move(link, way, source, target, runs)


def test_plans_between_processes(world: World) -> None:
    a, b = world.local(), world.process("other")
    for pair in PAIRS:
        for verb in (Verb.READ, Verb.WRITE):
            move_plans(world, a, b, pair, verb)


def test_death_in_the_middle_of_a_copy(world: World) -> None:
    """The copies that run are harmless and come to an end, the batches fail, and the GPU serves others as before."""
    size = 1 << 30
    a, b = world.local(), world.process("short-lived")
    for participant in (a, b):
        participant.allocate([size], 1)
    link = world.link(a, b)
    started = [link.start(TransferMode.READ, b, a, Runs.of([0], [0], [size])) for _ in range(400)]
    b.kill()
    results = world.finish(*started, seconds=10)
    assert results[-1].error is not None
    assert all(r.quiet and (r.error is None or "short-lived" in r.error) for r in results)
    c = world.local()
    c.allocate([1 << 20], 2)
    world.move(world.link(a, c), TransferMode.READ, c, a, Runs.of([0], [5], [1_000_000]))


def test_work_of_the_engine_comes_first(world: World) -> None:
    """A fence that is a CUDA event is waited for on the GPU: the copy sees what was computed before it, and the host
    blocks nowhere."""
    a, b = world.local(), world.local()
    world.allocate(a, b)
    link = world.link(a, b)
    region = a._memories[0][0].region
    tensor = wrap(region.address, region.nbytes, region.device)
    runs = Runs.of([0], [0], [1_000_000])
    tensor.fill_(1)  # the first use of a kernel loads it, for which the driver waits for the GPU
    world.move(link, TransferMode.WRITE, a, b, runs)
    before = b.content(0)
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            tensor.fill_(77)
            after = fence(str(tensor.device))
    started = link.start(TransferMode.WRITE, a, b, runs, fences={a.name: after})
    assert not after.passed(), "the GPU was done before the batch was submitted: nothing was tested"
    world.succeed(started)
    assert_equal(b.content(0), overlay(before, np.full(tensor.numel(), 77, np.uint8), runs), "the target's memory")


def test_host_memory_is_refused(world: World) -> None:
    participant = world.local()
    array = np.zeros(4096, np.uint8)
    with pytest.raises(TransportError, match="not memory of cuda:0"):
        participant.transport.register([Region(array.ctypes.data, 4096, "cuda:0")])
    with pytest.raises(TransportError, match="no GPU 99"):
        participant.transport.register([Region(array.ctypes.data, 4096, "cuda:99")])


SEGMENTS = """
import torch
from kvxfer.errors import TransportError
from kvxfer.geometry import Region
from kvxfer_cuda_ipc import CudaIpcTransport
print(CudaIpcTransport.probe().reason)
tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
transport = CudaIpcTransport("agent", {})
try:
    transport.register([Region(tensor.data_ptr(), tensor.numel(), "cuda:0")])
except TransportError as e:
    print(e)
transport.close()
"""


def test_expandable_segments_are_refused() -> None:
    """Their memory cannot be shared by handle; both `probe` and `register` say so."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    child = subprocess.run(
        [sys.executable, "-c", SEGMENTS], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    said, refusal = child.stdout.splitlines()[-2:]
    assert "expandable segments cannot be shared" in said
    assert "cannot be shared with another process" in refusal and "expandable segments" in refusal


def test_everything_is_given_back(world: World) -> None:
    """GPU memory that a transport takes is free again after `close`, also what it had opened of a peer."""
    participant, other = world.local(), world.process("other")
    for p in (participant, other):
        p.allocate([256 << 20], 1)
    world.succeed(
        world.link(participant, other).start(TransferMode.READ, other, participant, Runs.of([0], [0], [1 << 20]))
    )
    participant.close()
    before = sum(used())
    for _ in range(20):
        again = world.local()
        again.allocate([4096], 1)
        world.link(again, other)
        again.close()
    assert sum(used()) < before + (64 << 20)
