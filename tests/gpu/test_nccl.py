"""The NCCL back end with NCCL itself, between two GPUs of one host. Run with ``-s`` to see the figures.

Two participants of one process are driven by one thread; those that are killed or stopped are processes of their own.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.geometry import Runs
from kvxfer.geometry.region import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import Suite, TransferMode, World
from kvxfer.testing.participant import LocalParticipant
from kvxfer_nccl import NcclTransport
from kvxfer_nccl.binding import PipeSpec
from kvxfer_nccl.library import NcclPipe
from kvxfer_nccl.options import Options
from tests.backends.nccl_faults import SMALL, Faults, open_pipes
from tests.conftest import require
from tests.gpu.device import used

require("nccl")

import torch  # noqa: E402  (only where it can be used)

pytestmark = pytest.mark.gpus

MIB = 1 << 20


class TwoGpus(World):
    """The first participant of those that are open on one GPU, all others on the other: two ranks cannot share one."""

    def _device(self) -> str:
        return "cuda:1" if self._remote or any(not one.closed for one in self._local) else "cuda:0"

    def local(self, device: str | None = None, name: str | None = None) -> LocalParticipant:
        return super().local(None if device == "cuda:0" else device, name)  # of a kind, then, and not of this GPU


class TestCuda(ConformanceSuite):
    backend = NcclTransport
    memory = "cuda"
    rounds = 24
    patience_s = 60.0
    closing_s = 0.8

    @pytest.fixture
    def world(self) -> Iterator[World]:
        world = TwoGpus(self)
        yield world
        world.close()


class TestFaults(Faults):
    backend = NcclTransport
    memory = "cuda"
    pipe = NcclPipe
    patience_s = 60.0
    loops = 2
    moment_s = 0.006
    idle_s = 4.0
    spared: ClassVar[tuple[int, ...]] = 0, 0, 64, 64
    """MiB of either GPU: a communicator takes 200 and more, and CUDA keeps a few once several have been open at once."""

    @pytest.fixture
    def world(self) -> Iterator[World]:
        world = TwoGpus(self)
        yield world
        world.close()

    def used(self) -> tuple[int, ...]:
        return *super().used(), *(nbytes // MIB for nbytes in used())


class Figures(Suite):
    backend = NcclTransport
    memory = "cuda"
    patience_s = 120.0
    __test__ = False


class Heart:
    """How long other threads of this process were kept from running: what the engine would feel."""

    def __enter__(self) -> Heart:
        self.worst, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            self.worst, last = max(self.worst, now - last - 0.001), now

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def world() -> Iterator[World]:
    world = TwoGpus(Figures())
    yield world
    world.close()


def participant(world: World, nbytes: int, **options: Any) -> LocalParticipant:
    made = LocalParticipant(NcclTransport, options, f"participant-{len(world._local)}", world._device())
    world.adopt(made)
    # Not by allocate, which makes its content on the host.
    made.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=made._device)  # type: ignore[attr-defined]
    made.region = Region(made.buffer.data_ptr(), nbytes, made._device)  # type: ignore[attr-defined]
    made.transport.register([made.region])  # type: ignore[attr-defined]
    return made


def taken() -> tuple[int, ...]:
    gc.collect()
    torch.cuda.empty_cache()
    return used()


def rate(world: World, link: Any, a: LocalParticipant, b: LocalParticipant, size: int, count: int) -> float:
    """GB/s of ``count`` messages of ``size`` bytes, all in flight."""
    runs = Runs.of([0], [0], [size])
    world.succeed(link.start(TransferMode.SEND, a, b, runs))
    best = 0.0
    for _ in range(5):
        begun = time.perf_counter()
        world.succeed(*[link.start(TransferMode.SEND, a, b, runs) for _ in range(count)])
        best = max(best, size * count / (time.perf_counter() - begun) / 1e9)
    return best


def raw(a: LocalParticipant, b: LocalParticipant, channels: int, sizes: list[int]) -> list[str]:
    """GB/s of one message at a time through NCCL alone: no link, no talk."""
    binding = a.transport._binding  # type: ignore[attr-defined]
    unique_id, options = binding.unique_id(), Options(channels=channels)
    pipes = [binding.pipe(PipeSpec(unique_id, sends, p._device, options)) for sends, p in ((True, a), (False, b))]
    threads = [threading.Thread(target=pipe.open) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    out = []
    for size in sizes:
        seconds = []
        for _ in range(7):
            begun = time.perf_counter()
            pipes[1].move([(b.region.address, size)])  # type: ignore[attr-defined]
            pipes[0].move([(a.region.address, size)])  # type: ignore[attr-defined]
            marks = [pipe.mark() for pipe in pipes]
            while not all(mark.passed() for mark in marks):
                pass
            seconds.append(time.perf_counter() - begun)
        out.append(f"{size / float(np.median(seconds)) / 1e9:.0f}")
    for pipe in pipes:
        pipe.abort()
    return out


@pytest.mark.parametrize("channels", [4, 8, 12, 16, 24, 32])
def test_memory_and_speed_by_channels(world: World, channels: int) -> None:
    """Printed for the documentation: what a communicator takes on either GPU, and how fast it is."""
    a, b = (participant(world, 1 << 30, channels=channels, idle_close_s=3600) for _ in range(2))
    before, each, links = taken(), [], []
    with Heart() as heart:
        for _ in range(4):
            link = world.link(a, b)
            begun = time.perf_counter()
            world.succeed(link.start(TransferMode.SEND, a, b, SMALL))
            first = time.perf_counter() - begun
            now = taken()
            each.append([f"{(y - x) / MIB:.0f}" for x, y in zip(before, now, strict=True)])
            before = now
            links.append(link)
    alone = raw(a, b, channels, [8 * MIB, 128 * MIB, 1 << 30])
    speeds = [f"{rate(world, links[0], a, b, s, n):.0f}" for s, n in ((8 * MIB, 16), (128 * MIB, 1), (1 << 30, 1))]
    with Heart() as dying:
        for link in links:
            a.disconnect(link.peers[a.name])
            b.disconnect(link.peers[b.name])
        world.wait_for(lambda: not a.transport._ending and not b.transport._ending, "aborts")  # type: ignore[attr-defined]
    after = taken()
    print(
        f"\nchannels {channels}: MiB on (sender, receiver) GPU, first to fourth communicator {each}, "
        f"still taken after all are closed {[round((y - x) / MIB) for x, y in zip(before, after, strict=True)]} "
        f"(negative: given back); first message {first * 1e3:.0f} ms; "
        f"GB/s 16 x 8 MiB {speeds[0]}, 128 MiB {speeds[1]}, 1 GiB {speeds[2]}; "
        f"NCCL alone, one message at a time, 8 MiB, 128 MiB, 1 GiB: {', '.join(alone)}; "
        f"longest stall of other threads: making {heart.worst * 1e3:.0f} ms, aborting {dying.worst * 1e3:.0f} ms"
    )


def test_an_idle_communicator_gives_its_memory_back(world: World) -> None:
    """With the settings as shipped, on either GPU, besides what NCCL takes once for a process."""
    a, b = (participant(world, MIB) for _ in range(2))
    world.succeed(world.link(a, b).start(TransferMode.SEND, a, b, SMALL))
    before = taken()
    links = [world.link(a, b) for _ in range(4)]
    world.succeed(*(link.start(TransferMode.SEND, a, b, SMALL) for link in links))
    took = [(y - x) / 4 / MIB for x, y in zip(before, taken(), strict=True)]
    print(f"\nMiB a communicator on (sender, receiver) GPU, {Options().channels} channels: {took}")
    world.wait_for(lambda: open_pipes(a) == open_pipes(b) == 0, "the closing of idle communicators")
    world.run(1.0)
    left = [(y - x) / 4 / MIB for x, y in zip(before, taken(), strict=True)]
    print(f"MiB a communicator after {Options().idle_close_s:g} s without a transfer: {left}")
    assert max(left) <= 1, f"{left} MiB a communicator are not given back"


def test_communicators_keep_no_memory_of_torch(world: World) -> None:
    """It keeps what it gives to a stream for that stream: 2 MiB for each communicator that there has ever been."""
    a, b = (participant(world, MIB) for _ in range(2))
    world.succeed(world.link(a, b).start(TransferMode.SEND, a, b, SMALL))
    before = [torch.cuda.memory_reserved(d) for d in (0, 1)]
    links = [world.link(a, b) for _ in range(6)]
    world.succeed(*(link.start(TransferMode.SEND, a, b, SMALL) for link in links))
    assert [torch.cuda.memory_reserved(d) for d in (0, 1)] == before


def test_submitting_is_quick(world: World) -> None:
    """Printed: what a message costs the data thread, both halves."""
    a, b = (participant(world, 64 * MIB) for _ in range(2))
    link = world.link(a, b)
    world.succeed(link.start(TransferMode.SEND, a, b, SMALL))
    calls = []
    for _ in range(200):
        begun = time.perf_counter()
        started = link.start(TransferMode.SEND, a, b, SMALL)
        a.turn(True)
        b.turn(True)
        calls.append(time.perf_counter() - begun)
        world.succeed(started)
    print(f"\nsubmit and enqueue both halves: {np.median(calls) * 1e6:.0f} us")


def test_probe_names_the_versions() -> None:
    probe = NcclTransport.probe()
    assert probe.usable and probe.memory == {"cuda"}
    print("\n", dict(probe.facts))
