"""The cuda_ipc back end as far as it goes without a GPU: all but driver calls and what only a GPU can compute."""

import ctypes
import errno
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer.errors import TransportError
from kvxfer.geometry import CopyPattern, Region
from kvxfer.geometry.strided_copy import StridedCopy
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.transport import PlanBatch, Verb
from kvxfer_cuda_ipc.endpoint import Endpoint
from kvxfer_cuda_ipc.exports import Opened
from kvxfer_cuda_ipc.gpu import SLOTS, THREADS, WORK, Gpu, blocks_for, write_work
from kvxfer_cuda_ipc.library import CudaError
from kvxfer_cuda_ipc.options import Options
from kvxfer_cuda_ipc.tables import Launch, Placement, divisor, of_runs, of_strided_copy
from tests.backends.altered import altered_as
from tests.backends.cuda_on_host import HostContext, HostGpu, OnHost
from tests.backends.cuda_plans import PAIRS, move_plans, planner

altered = partial(altered_as, Endpoint)

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class TestOnHost(ConformanceSuite):
    backend = OnHost
    gigabytes = False
    revokes = False


BACKEND = "tests.backends.cuda_on_host:OnHost"


class PlayedApi:
    """A driver of which every call does well and nothing, save those in ``says``, which return that. Counts what it keeps for others."""

    def __init__(self, **says: Any) -> None:
        self.says, self.calls, self.kept = says, list[str](), 0
        self.values = {
            "cuCtxGetStreamPriorityRange": (0, -1),
            "cuMemHostAlloc": ((host := np.zeros(1 << 24, np.uint8)).ctypes.data,),
        }
        self.host = host

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            self.calls.append(name)
            said = self.says.get(name, (0, *self.values.get(name, (1,))))
            error, *values = said() if callable(said) else said
            if not error:
                self.kept += name.startswith(("cuStreamCreate", "cuMemHostAlloc", "cuMemAlloc", "cuEventCreate"))
                self.kept -= name.startswith(("cuStreamDestroy", "cuMemFree", "cuEventDestroy"))
            return error, *values

        return call


def gpu(api: PlayedApi) -> Gpu:
    return Gpu(MagicMock(api=api), Options())  # a context manager, with a kernel for everything


def launch(nbytes: int = 4096) -> Launch:
    return next(iter(of_runs(np.array([4096]), np.array([1 << 40]), np.array([nbytes]))))


def test_launches_that_fail_leave_room_for_others() -> None:
    played = gpu(api := PlayedApi(cuLaunchKernel=(701,)))
    for _ in range(2 * SLOTS):
        with pytest.raises(CudaError):
            played.start(launch(), None)
    del api.says["cuLaunchKernel"]
    for number in range(1, SLOTS + 1):
        assert played.ready and played.start(launch(), None) == number
    assert not played.ready


def test_a_launch_that_fails_half_way_is_over() -> None:
    """Its batch ends then, and others may have the memory: but copies that no event tells of were still under way."""
    records = iter([(0,), (700,)])
    played = gpu(api := PlayedApi(cuEventRecord=lambda: next(records)))
    with pytest.raises(CudaError, match="recording"):
        played.start(launch(), None)
    assert [call for call in api.calls if call in ("cuLaunchKernel", "cuStreamSynchronize")][
        -1
    ] == "cuStreamSynchronize"


def test_a_launch_whose_time_cannot_be_had_is_over_all_the_same() -> None:
    """It had not been counted, so that each batch after it was waited for without end; and the GPU was taken for lost."""
    played = gpu(PlayedApi(cuEventElapsedTime=(400, 0.0), cuEventQuery=(0,)))
    played.start(launch(1 << 24), None)
    assert played.finished() == 1
    for number in range(2, SLOTS + 2):
        assert played.ready and played.start(launch(1 << 24), None) == number


@pytest.mark.parametrize("lacks", ["cuMemHostAlloc", "cuMemAlloc", "cuEventCreate"])
def test_what_a_gpu_lacks_memory_for_keeps_nothing(lacks: str) -> None:
    """A back end that cannot be opened is tried again and again; each time it kept a stream, and pinned memory."""
    api = PlayedApi(**{lacks: (2,)})
    with pytest.raises(CudaError):
        gpu(api)
    assert api.kept == 0
    api.says.clear()
    made = gpu(api)
    assert api.kept > 3
    made.close()
    assert api.kept == 0


# ---------------------------------------------------------------------------------------------------------------------
# Mappings


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses at which memory of other processes is mapped."""
    found: list[int] = []
    monkeypatch.setattr(Opened, "_own", Opened._map)  # this process's memory as if it were another's
    opens = HostContext.open

    def opened(context: HostContext, shared: bytes) -> int:
        found.append(opens(context, shared))
        return found[-1]

    monkeypatch.setattr(HostContext, "open", opened)
    monkeypatch.setattr(HostContext, "unmap", lambda context, address: found.remove(address))
    return found


def test_memory_of_a_peer_is_mapped_while_a_link_to_it_is_there(world: World, mapped: list[int]) -> None:
    a, b = world.local(), world.local()
    world.allocate(a, b)
    first = a.connect(a.endpoint(), b.endpoint())
    once = len(mapped)
    second = a.connect(a.endpoint(), b.endpoint())
    assert len(mapped) == once > 0
    for peer, left in ((first, once), (second, 0)):
        a.disconnect(peer)
        world.run(0.05)
        assert len(mapped) == left


def test_memory_is_not_kept_mapped_for_a_link_that_could_not_be_made(
    world: World, mapped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no descriptor is left. It had stayed mapped for good, after the peer's end as well, which keeps the GPU's memory."""
    a, b = world.local(), world.local()
    world.allocate(a, b)
    mine, theirs = a.endpoint(), b.endpoint()
    with monkeypatch.context() as short:
        short.setattr("kvxfer.backend.liveness.socket.socket", _none_left)
        with pytest.raises(TransportError, match="no link"):
            a.connect(mine, theirs)
    assert not mapped
    a.disconnect(a.connect(mine, theirs))
    world.run(0.05)
    assert not mapped


def _none_left(*_: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def test_memory_that_is_still_being_copied_stays_mapped(mapped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that lost it would fail with the GPU's whole context, in which the engine computes."""
    a, b = OnHost("a", {}), OnHost("b", {})
    content = np.zeros(1 << 16, np.uint8)
    for one in (a, b):
        one.register([Region(content.ctypes.data, content.nbytes)])
    a.connect(a.endpoint(), b.endpoint())
    assert len(mapped) == 1

    def close(gpu: HostGpu) -> None:
        raise TransportError("copies have not ended")

    with monkeypatch.context() as stuck:
        stuck.setattr(HostGpu, "close", close)
        with pytest.raises(TransportError, match="have not ended"):
            a.close()
    assert len(mapped) == 1
    b.close()


# ---------------------------------------------------------------------------------------------------------------------
# Plans


@pytest.mark.parametrize("verb", [Verb.READ, Verb.WRITE])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_plan_moves_what_its_runs_say(world: World, pair: str, verb: Verb) -> None:
    move_plans(world, world.local(), world.local(), pair, verb)


@pytest.mark.parametrize("shift", [-(1 << 20), 1 << 20])
@pytest.mark.parametrize("side", ["src_at", "dst_at"])
def test_a_plan_that_leaves_the_memory_is_refused(world: World, side: str, shift: int) -> None:
    src, dst = PAIRS["layout"]
    a, b = world.local(), world.local()
    for participant, of in ((a, src), (b, dst)):
        participant.allocate([r.nbytes for r in of.regions], 1)
    link = world.link(a, b)
    plan = planner(src, dst).plan([np.arange(8)], [np.arange(8)], 0, 32)
    strided = plan.copies[0]
    places = {"src_at": strided.src_at, "dst_at": strided.dst_at}
    places[side] = places[side] + np.where(np.arange(len(strided.counts)) == 2, shift, 0)
    moved = type(plan)((StridedCopy(strided.pattern, places["src_at"], places["dst_at"], strided.counts),))
    before = b.content(0)
    with pytest.raises(TransportError, match="outside"):
        b.submit(PlanBatch(Verb.READ, link.peers[b.name], 0, moved))
    world.run(0.05)
    assert_equal(b.content(0), before, "the target's memory")


# ---------------------------------------------------------------------------------------------------------------------
# The kernel, compiled for the CPU


HARNESS = """
#include <cstdint>
struct uint4 { uint32_t x, y, z, w; }; struct uint2 { uint32_t x, y; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
template <typename T> T __ldcs(const T* p) { return *p; }
template <typename T> void __stcs(T* p, T v) { *p = v; }
#include "%s"
#define CASE(WORD, STEPS) if (word == WORD && steps == STEPS) copy##WORD##x##STEPS(*work);
#define CASES(WORD) CASE(WORD, 1) CASE(WORD, 2) CASE(WORD, 4) CASE(WORD, 8)
extern "C" int work_bytes() { return sizeof(Work); }
extern "C" void run(const Work* work, int word, int steps, unsigned blocks, unsigned threads) {
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) { CASES(16) CASES(8) CASES(4) CASES(2) CASES(1) }
}
"""

Kernel = Callable[[Launch, int], None]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The kernel itself, one thread after the other."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    import kvxfer_cuda_ipc

    folder = tmp_path_factory.mktemp("kernel")
    source, library = folder / "harness.cpp", folder / "harness.so"
    source.write_text(HARNESS % (Path(kvxfer_cuda_ipc.__file__).parent / "copy.cu"))
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    subprocess.run(["g++", *flags, "-o", library, source], check=True, timeout=300)
    compiled = ctypes.CDLL(str(library))
    assert compiled.work_bytes() == WORK.size

    def run(launch: Launch, blocks: int) -> None:
        segments = np.stack([launch.src_at, launch.dst_at, launch.counts])
        rows, work = np.ascontiguousarray(launch.rows.table), ctypes.create_string_buffer(WORK.size)
        write_work(launch, rows.ctypes.data, segments.ctypes.data, work)
        compiled.run(work, launch.word, launch.tile.steps, blocks, THREADS)

    return run


def _placed(nbytes: int, skew: int) -> tuple[Bytes, int]:
    """Memory whose address is ``skew`` modulo 64."""
    raw = np.zeros(nbytes + 128, np.uint8)
    at = -raw.ctypes.data % 64 + skew
    return raw[at : at + nbytes], raw.ctypes.data + at


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_kernel_copies_a_sheet(kernel: Kernel, data: st.DataObject) -> None:
    """Any rows and segments, at any alignment, on any number of blocks."""
    align = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    unit = data.draw(st.integers(1, 96)) * data.draw(st.sampled_from([1, align]))
    rows, segments, most = (data.draw(st.integers(1, n)) for n in (7, 9, 5))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    row = -(-unit * most // align) * align
    src_rows, dst_rows = (random.permutation(rows + 2)[:rows] * row for _ in range(2))
    pitch = (rows + 2) * row
    src_at, dst_at = (random.permutation(segments + 2)[:segments] * pitch for _ in range(2))
    counts = random.integers(1, most + 1, segments)
    skews = [data.draw(st.sampled_from([0, align])) for _ in range(2)]
    (src, src_address), (dst, dst_address) = (_placed((segments + 2) * pitch, skew) for skew in skews)
    src[:] = random.integers(0, 256, len(src), dtype=np.uint8)
    strided = StridedCopy(CopyPattern(src_rows, dst_rows, (), unit), src_at, dst_at, counts)
    placement = Placement.of(
        strided.pattern,
        [Region(src_address, len(src))],
        [Region(dst_address, len(dst))],
        int(src_at.min()),
        int(dst_at.min()),
    )
    assert placement is not None and placement.holds(strided)
    expected = dst.copy()
    for s in range(segments):
        for r in range(rows):
            n, a, b = unit * counts[s], src_at[s] + src_rows[r], dst_at[s] + dst_rows[r]
            expected[b : b + n] = src[a : a + n]
    launches = list(of_strided_copy(strided, placement))
    for launch in launches:
        kernel(launch, data.draw(st.integers(1, 3)))
    assert_equal(dst, expected, "the target")
    assert sum(launch.nbytes for launch in launches) == strided.nbytes
    if not (unit % align or any(skews) and align < 16):
        assert all(launch.word >= align for launch in launches)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40), st.integers(0, 3), st.sampled_from([1, 3, 4, 16, 70_000]), st.data())
def test_the_kernel_copies_runs(kernel: Kernel, sizes: list[int], long: int, align: int, data: st.DataObject) -> None:
    lengths = np.array([n * align for n in sizes if n * align < 1 << 20] + [100_000 * align % 999_983] * long, np.int64)
    lengths = lengths[lengths < 1 << 20]
    src_at = np.cumsum(lengths) - lengths
    order = np.random.default_rng(len(sizes)).permutation(len(lengths))
    dst_at = np.empty_like(src_at)
    dst_at[order] = np.cumsum(lengths[order]) - lengths[order]
    total = int(lengths.sum())
    (src, src_address), (dst, dst_address) = _placed(total + 64, 0), _placed(total + 64, data.draw(st.integers(0, 1)))
    src[:] = np.random.default_rng(1).integers(0, 256, len(src), dtype=np.uint8)
    expected = dst.copy()
    for a, b, n in zip(src_at, dst_at, lengths, strict=True):
        expected[b : b + n] = src[a : a + n]
    for launch in of_runs(src_at + src_address, dst_at + dst_address, lengths):
        kernel(launch, min(2, blocks_for(launch)))
    assert_equal(dst, expected, "the target")


@pytest.mark.parametrize("lengths", [[(1 << 32) + 5], [1 << 34, 3], [100, (1 << 35) + 1, 7]])
def test_rows_have_no_more_words_than_the_kernel_counts(lengths: list[int]) -> None:
    """At odd addresses a word is a byte. Of a run of 4 GiB and 5 bytes, 5 had been copied."""
    ends = np.cumsum(np.array(lengths, np.int64))
    at = ends - lengths + 1
    launches = list(of_runs(at, at + (1 << 40), np.array(lengths, np.int64)))
    assert sum(launch.nbytes for launch in launches) == sum(lengths)
    one = CopyPattern(np.zeros(1, np.int64), np.zeros(1, np.int64), (), 1)
    strided = StridedCopy(one, at - 1, at - 1, np.array(lengths, np.int64))
    placement = Placement.of(one, [Region(1, sum(lengths))], [Region(1 << 40, sum(lengths))], 0, 0)
    assert placement is not None
    launches += of_strided_copy(strided, placement) if placement.holds(strided) else ()
    for launch in launches:
        assert launch.unit * int(launch.counts.max()) <= 1 << 31
        assert launch.total < 1 << 31


@given(st.integers(1, (1 << 31) - 1), st.lists(st.integers(0, (1 << 31) - 1)))
def test_divisors_are_exact(d: int, values: list[int]) -> None:
    multiplier, shift = divisor(d)
    assert multiplier < 1 << 33 and shift < 64
    for x in [*values, 0, d - 1, d, (1 << 31) - 1, ((1 << 31) - 1) // d * d]:
        if x < 1 << 31:
            assert x * multiplier < 1 << 64
            assert x * multiplier >> shift == x // d


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_what_cannot_work_is_refused_when_connecting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = world.local(), world.local()
    world.allocate(a, b)
    with pytest.raises(TransportError, match=f"{b.name} runs on another host"):
        a.connect(a.endpoint(), altered(b.endpoint(), socket=f"kvxfer-cuda-ipc-{'0' * 32}"))
    with pytest.raises(TransportError, match="release"):
        a.connect(a.endpoint(), altered(b.endpoint(), format=99))
    monkeypatch.setattr(Opened, "_own", Opened._map)
    with pytest.raises(TransportError, match=f"memory of {b.name} cannot be opened.*--ipc=host"):
        memory = Endpoint.decode(b.endpoint()).memories[0]
        allocations = tuple(msgspec.structs.replace(x, handle=b"\xff" * 64) for x in memory.allocations)
        unknown = msgspec.structs.replace(memory, allocations=allocations)
        a.connect(a.endpoint(), altered(b.endpoint(), memories=(unknown,)))


@pytest.mark.parametrize("own", [True, False])
def test_memory_that_is_smaller_than_its_owner_says_is_refused(
    world: World, mapped: list[int], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Also where it is mapped already, for a link whose peer has told the truth. A copy beyond its end would end this process's GPU
    context, which is its engine's."""
    if own:
        monkeypatch.undo()
    a, b = world.local(), world.local()
    world.allocate(a, b)
    memory = Endpoint.decode(b.endpoint()).memories[0]
    allocations = tuple(msgspec.structs.replace(x, nbytes=x.nbytes + (1 << 40)) for x in memory.allocations)
    larger = msgspec.structs.replace(memory, allocations=allocations)
    for _ in range(2):
        with pytest.raises(
            TransportError, match=f"{b.name} says that its GPU memory has .* bytes, and the driver says"
        ):
            a.connect(a.endpoint(), altered(b.endpoint(), memories=(larger,)))
        assert not mapped
        a.disconnect(a.connect(a.endpoint(), b.endpoint()))
        world.run(0.05)


def test_gpus_without_peer_access_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = world.local(), world.local()
    world.allocate(a, b)
    monkeypatch.setattr("tests.backends.cuda_on_host.HostContext.reaches", lambda self, uuid: False)
    with pytest.raises(TransportError, match=f"no peer access to the GPU of {b.name}"):
        a.connect(a.endpoint(), b.endpoint())
