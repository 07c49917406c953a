"""The rules of ``kvxfer.memory.Space``, each a test, against the same content in host memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer import memory
from kvxfer.errors import KvxferError
from kvxfer.geometry import HOST, CopyPattern, CopyPlan, Region, StridedCopy
from kvxfer.memory import Fence, Space
from kvxfer.memory.regions import Side
from kvxfer.memory.space import SPACE_CONTRACTS
from kvxfer.testing.spaces.layouts import LAYOUTS, Held, hold_cache, layout_pairs, plan_between, rows_of
from kvxfer.testing.usage import resident

__all__ = ["SpaceSuite"]

MIB = 1 << 20
SLICE = 200
"""Bytes of a piece of a plan, so that each plan has some."""


def _named(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    """Return pairs of layouts as cases with names to read."""
    return [pytest.param(*pair, id=" to ".join(pair)) for pair in pairs]


class Unpassed:
    """A fence that never passes."""

    event = None

    def passed(self) -> bool:
        return False


class Broken:
    """A fence of a device that has failed."""

    event = None

    def passed(self) -> bool:
        raise KvxferError("the device has failed")


class SpaceSuite:
    """Settings of the suite; a subclass sets them as class attributes.

    Attributes:
        space: The class under test.
        device: The device whose memory is used.
        patience_s: Seconds that anything may take.
    """

    __test__ = False

    space: ClassVar[type[Space]]
    device: ClassVar[str]
    patience_s: ClassVar[float] = 20.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = hasattr(cls, "space")

    def pass_(self, fence: Fence) -> None:
        assert isinstance(fence, Fence), f"{fence!r} is no kvxfer.Fence"
        until = time.monotonic() + self.patience_s
        while not fence.passed():
            assert time.monotonic() < until, f"a fence has not passed after {self.patience_s:g} s"
            time.sleep(0.001)

    def filled(self, nbytes: int, seed: int = 1) -> tuple[Space, np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return memory of the device with random content, and that content."""
        made = self.space.allocate(nbytes, self.device)
        content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        made.scatter(0, np.array([0]), content[None].copy())
        return made, content

    def held(self, layout: str, seed: int = 1) -> Held:
        """Return a cache with random content on the device, and the same on the host."""
        return hold_cache(LAYOUTS[layout], self.space, self.device, seed)

    @staticmethod
    def same(held: Held) -> None:
        """Compare all bytes of a cache with those on the host."""
        for i, (found, wanted) in enumerate(zip(held.image(), held.expected(), strict=True)):
            wrong = np.flatnonzero(found != wanted)
            assert not len(wrong), f"{len(wrong)} bytes of region {i} are wrong, the first at offset {wrong[0]}"

    @staticmethod
    def packed(held: Held, made: CopyPlan) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the packed stream of a plan's source, by the host."""
        out = memory.allocate(made.nbytes)
        held.host.pack(made, out)
        return rows_of(out, 0, 0, made.nbytes)

    def test_it_says_what_it_is(self) -> None:
        """The class declares its contract, and has a device of each kind that it says is here: ``kind:N``, or host memory."""
        assert self.space.contract in SPACE_CONTRACTS
        kind = self.device.partition(":")[0]
        for device in self.space.devices(kind):
            name, _, number = device.partition(":")
            assert device == HOST or (name == kind and number.isdecimal()), device
        assert not isinstance(self.space.devices(kind), str)

    def test_allocated_memory_is_one_zeroed_region(self) -> None:
        """``allocate`` returns a space of one region of that size on that device, which holds zeros."""
        for nbytes in (1, 4097, 3 * MIB):
            made = self.space.allocate(nbytes, self.device)
            assert isinstance(made, self.space) and made.device == self.device
            assert (made.region.nbytes, made.region.device) == (nbytes, self.device)
            assert made.region.address > 0, "an address or a handle is positive"
            assert not rows_of(made, 0, 0, nbytes).any()
            self.filled(nbytes)  # so that what is freed and allocated again is not zero by chance
            del made

    def test_too_much_memory_is_refused(self) -> None:
        """``allocate`` and ``allocate_host`` fail with a ``KvxferError`` for more bytes than any device has."""
        with pytest.raises(KvxferError):
            self.space.allocate(1 << 60, self.device)
        with pytest.raises(KvxferError):
            self.space.allocate_host(1 << 60)

    def test_allocations_are_apart(self) -> None:
        """Each call of ``allocate`` gives memory of its own, and a region keeps its memory alive by itself."""
        several = [self.filled(4096 + i, i) for i in range(5)]
        regions, contents = [s.region for s, _ in several], [c for _, c in several]
        addresses = sorted((r.address, r.nbytes) for r in regions)
        for (a, n), (b, _) in zip(addresses, addresses[1:], strict=False):
            assert a + n <= b, "regions of one device must not overlap, even if their addresses are handles"
        del several
        gc.collect()
        for i in range(5):
            self.filled(4096 + i, 100 + i)
        for region, content in zip(regions, contents, strict=True):
            assert np.array_equal(rows_of(self.space((region,), self.device), 0, 0, region.nbytes), content)

    def test_memory_is_given_back(self) -> None:
        """What was allocated is freed with its region, as far as the memory of this process shows it."""
        before = resident()
        kept, _ = self.filled(64 * MIB)
        if resident() - before < 32 * MIB:
            pytest.skip("this process does not show the device's memory")
        del kept
        for _ in range(10):
            self.filled(64 * MIB)
        assert resident() - before < 256 * MIB, f"{(resident() - before) // MIB} MiB are left of 640 MiB"

    def test_rows_come_back(self) -> None:
        """``gather`` returns the bytes of each row, in the order asked for; rows may overlap and repeat."""
        made, content = self.filled(70_001)
        for n, nbytes in ((1, 1), (1, 70_001), (50, 3), (300, 64), (9, 4099)):
            at = np.random.default_rng(n).integers(0, 70_001 - nbytes + 1, n)
            at[-1], at[0] = 70_001 - nbytes, at[0] if n > 1 else 70_001 - nbytes
            room = np.full((n + 2, nbytes), 7, np.uint8)
            made.gather(0, at, room[1:-1])
            assert np.array_equal(room[1:-1], np.stack([content[x : x + nbytes] for x in at]))
            assert (room[[0, -1]] == 7).all(), "bytes beside the rows were written"

    def test_exactly_these_rows_change(self) -> None:
        """``scatter`` writes each row to its place, whatever their order, and no other byte."""
        made, content = self.filled(70_001)
        for n, nbytes in ((1, 1), (1, 70_001), (50, 3), (300, 64), (9, 4099)):
            random = np.random.default_rng(n)
            at = random.permutation(70_001 // nbytes)[:n] * nbytes
            data = random.integers(0, 256, (n, nbytes), dtype=np.uint8)
            made.scatter(0, at, data)
            for x, row in zip(at.tolist(), data, strict=True):
                content[x : x + nbytes] = row
            assert np.array_equal(rows_of(made, 0, 0, 70_001), content)

    def test_scattered_rows_are_the_callers_again(self) -> None:
        """When ``scatter`` has returned, the caller may overwrite what it gave."""
        made = self.space.allocate(8 * MIB, self.device)
        for value in range(1, 6):
            data = np.full((8, MIB), value, np.uint8)
            made.scatter(0, np.arange(8) * MIB, data)
            data[:] = 99
            time.sleep(0.02)
            assert (rows_of(made, 0, 0, 8 * MIB) == value).all()

    def test_regions_are_told_apart(self) -> None:
        """Rows are of the region with that number, at an offset in it."""
        several = [self.filled(5000 + i, i) for i in range(3)]
        made = self.space(tuple(s.region for s, _ in several), self.device)
        for i, (_, content) in enumerate(several):
            assert np.array_equal(rows_of(made, i, 17, 900), content[17:917])
        made.scatter(1, np.array([3]), np.zeros((1, 5), np.uint8))
        several[1][1][3:8] = 0
        for one, content in several:
            assert np.array_equal(rows_of(one, 0, 0, one.nbytes), content)

    @pytest.mark.parametrize(("src", "dst"), _named(layout_pairs()))
    def test_any_layout(self, src: str, dst: str) -> None:
        """What is packed is what host memory of that layout gives; what is unpacked is where it belongs, and nothing else changes."""
        source, sink = self.held(src, 1), self.held(dst, 2)
        made = plan_between(source, sink)
        out = self.space.allocate_host(made.nbytes)
        self.pass_(source.space.pack(made, out))
        assert np.array_equal(rows_of(out, 0, 0, made.nbytes), self.packed(source, made)), "the packed stream is wrong"
        self.pass_(sink.space.unpack(made, out))
        assert np.array_equal(rows_of(out, 0, 0, made.nbytes), self.packed(source, made)), (
            "unpacking changed the stream"
        )
        sink.host.unpack(made, out)
        self.same(source)
        self.same(sink)

    @pytest.mark.parametrize("where", ["its host memory", "the device"])
    @pytest.mark.parametrize("prepared", [False, True], ids=["at once", "prepared"])
    def test_pieces(self, where: str, prepared: bool) -> None:
        """Plans are cut, and each piece is packed and unpacked at any offset, in the device's memory too."""
        source, sink = self.held("odd, tokens first", 1), self.held("odd, padded", 2)
        pieces = list(plan_between(source, sink).split(SLICE))
        assert len(pieces) > 3
        room = sum(p.nbytes for p in pieces) + 11
        out = self.space.allocate_host(room) if where != "the device" else self.space.allocate(room, self.device)
        out.scatter(0, np.array([0]), np.full((1, room), 5, np.uint8))
        at, begun = 11, list[tuple[CopyPlan, int]]()
        for piece in pieces:
            self.pass_(source.space.pack(piece, out, at))
            assert np.array_equal(rows_of(out, 0, at, piece.nbytes), self.packed(source, piece))
            begun.append((piece, at))
            at += piece.nbytes
        assert (rows_of(out, 0, 0, 11) == 5).all(), "bytes before the piece were written"
        for piece, at in begun[::-1]:
            if prepared:
                self.pass_(sink.space.prepare_unpack(piece, out)(at))
            else:
                self.pass_(sink.space.unpack(piece, out, at))
            staged = memory.allocate(piece.nbytes)
            staged.scatter(0, np.array([0]), rows_of(out, 0, at, piece.nbytes)[None])
            sink.host.unpack(piece, staged)
        self.same(sink)

    def test_what_leaves_memory_is_refused(self) -> None:
        """A plan with a row outside its region, and a stream without room, are a ``ValueError``; nothing outside is touched."""
        source, sink = self.held("tokens first", 1), self.held("heads first", 2)
        made = plan_between(source, sink)
        short = Region(sink.space.regions[-1].address, sink.space.regions[-1].nbytes // 2, self.device)
        short.kept_by(sink.space.regions[-1].owner)
        cut = self.space((*sink.space.regions[:-1], short), self.device)
        out = self.space.allocate_host(made.nbytes)
        source.host.pack(made, out)
        calls: tuple[Callable[[], Fence], ...] = (
            lambda: sink.space.unpack(made, out, 1),
            lambda: source.space.pack(made, out, 1),
            lambda: source.space.pack(made, out, -1),
        )
        for call in calls:
            with pytest.raises(ValueError):
                self.pass_(call())
        self.same(sink)
        with pytest.raises(ValueError):
            self.pass_(cut.unpack(made, out))
        assert np.array_equal(sink.image()[-1][short.nbytes :], sink.expected()[-1][short.nbytes :])

    def test_nothing_is_moved_without_rows(self) -> None:
        """A space may have no region, and a plan no copies."""
        out = self.space.allocate_host(8)
        for one in (self.space((), self.device), self.filled(100)[0]):
            self.pass_(one.pack(CopyPlan(()), out))
            self.pass_(one.unpack(CopyPlan(()), out))
            assert one.checksum(CopyPlan(()), "source").value == 0

    @pytest.mark.parametrize(("src", "dst"), _named((a, b) for a, b in layout_pairs() if a <= b))
    def test_checksums_are_those_of_the_host(self, src: str, dst: str) -> None:
        """A checksum equals the checksum of the same content in host memory, read by either side, of all of a plan or of a sample."""
        source, sink = self.held(src, 1), self.held(dst, 2)
        made = plan_between(source, sink)
        for some in (made, memory.sample(made, 3)):
            side: Side
            for held, side in ((source, "source"), (sink, "destination")):
                found = held.space.checksum(some, side)
                assert found.value == held.host.checksum(some, side).value
                self.pass_(found.fence)

    def test_checksums_follow_the_content(self) -> None:
        """A checksum that was prepared reads the memory when it begins, and each byte counts."""
        held = self.held("odd, tokens first")
        made = plan_between(held, held)
        begin, before = held.space.prepare_checksum(made, "source"), held.space.checksum(made, "source").value
        place = int(made.copies[0].src_at[0] + made.copies[0].src_rows[0])
        region, at = held.host.locate(place, 1)
        held.space.scatter(region, np.array([at]), ~rows_of(held.space, region, at, 1)[None])
        changed = begin(None).value
        assert changed != before
        assert changed == held.space.checksum(made, "source").value

    def test_fences_pass(self) -> None:
        """``fence`` returns a fence that passes, and work after it may wait for it."""
        source, sink = self.held("tokens first", 1), self.held("heads first", 2)
        made, out = plan_between(source, sink), self.space.allocate_host(MIB)
        fence = self.space.fence(self.device)
        self.pass_(fence)
        self.pass_(source.space.pack(made, out, 0, self.space.fence(self.device)))
        self.pass_(sink.space.unpack(made, out, 0, fence))
        assert np.array_equal(rows_of(out, 0, 0, made.nbytes), self.packed(source, made))

    def test_no_fence_is_ignored(self) -> None:
        """What cannot wait for a fence refuses with a ``ValueError`` while that has not passed, and touches nothing."""
        source, sink = self.held("tokens first", 1), self.held("heads first", 2)
        made, out = plan_between(source, sink), self.space.allocate_host(MIB)
        calls: tuple[Callable[[], object], ...] = (
            lambda: source.space.pack(made, out, 0, Unpassed()),
            lambda: sink.space.unpack(made, out, 0, Unpassed()),
            lambda: source.space.checksum(made, "source", Unpassed()),
        )
        for call in calls:
            with pytest.raises(ValueError):
                call()
        assert not rows_of(out, 0, 0, MIB).any()
        self.same(sink)

    def test_fences_pass_when_the_work_is_done(self) -> None:
        """Once its fence has passed, what was packed is there, however much it is."""
        made, content = self.filled(32 * MIB)
        whole = _whole(made.nbytes)
        out = self.space.allocate_host(32 * MIB)
        self.pass_(made.pack(whole, out))
        assert np.array_equal(rows_of(out, 0, 0, 32 * MIB), content)
        back = self.space.allocate(32 * MIB, self.device)
        self.pass_(back.unpack(whole, out))
        assert np.array_equal(rows_of(back, 0, 0, 32 * MIB), content)

    def test_fences_pass_when_the_work_is_done_however_much_is_queued(self) -> None:
        """Work that is begun while other work is under way is done when its own fence has passed."""
        made, content = self.filled(8 * MIB)
        begun = []
        for i in range(8):
            out = self.space.allocate_host(MIB)
            begun.append((i, out, made.pack(_row(MIB, i * MIB), out)))
        for i, out, fence in begun[::-1]:
            self.pass_(fence)
            assert np.array_equal(rows_of(out, 0, 0, MIB), content[i * MIB :][:MIB]), f"pack {i} of 8 that were begun"

    @pytest.mark.parametrize("nbytes", [1, 4097, 65_537, MIB + 1])
    def test_any_length_at_any_offset(self, nbytes: int) -> None:
        """A stream may have any number of bytes and begin anywhere in staging memory; nothing beside it is touched."""
        made, content = self.filled(nbytes + 8)
        for at in (0, 4095, 65_536, 300_001):
            out, back = self.space.allocate_host(at + nbytes + 8), self.space.allocate(nbytes + 8, self.device)
            self.pass_(made.pack(_row(nbytes, 5), out, at))
            stream = np.zeros(at + nbytes + 8, np.uint8)
            stream[at : at + nbytes] = content[5 : 5 + nbytes]
            assert np.array_equal(rows_of(out, 0, 0, len(stream)), stream), f"{nbytes} bytes packed at {at}"
            self.pass_(back.unpack(_row(nbytes, 5), out, at))
            moved = np.zeros(nbytes + 8, np.uint8)
            moved[5 : 5 + nbytes] = content[5 : 5 + nbytes]
            assert np.array_equal(rows_of(back, 0, 0, len(moved)), moved), f"{nbytes} bytes unpacked from {at}"

    def test_errors_of_the_device_are_raised(self) -> None:
        """What fails on the device, here while a fence is waited for, is raised, and nothing is taken for moved."""
        source, sink = self.held("tokens first", 1), self.held("heads first", 2)
        made, out = plan_between(source, sink), self.space.allocate_host(MIB)
        calls: tuple[Callable[[], object], ...] = (
            lambda: source.space.pack(made, out, 0, Broken()),
            lambda: sink.space.unpack(made, out, 0, Broken()),
            lambda: source.space.checksum(made, "source", Broken()).value,
        )
        for call in calls:
            with pytest.raises(KvxferError):
                call()
        assert not rows_of(out, 0, 0, MIB).any()
        self.same(sink)

    def test_several_threads_at_once(self) -> None:
        """Objects over the same memory may be used by different threads at the same time."""
        made, content = self.filled(4 * MIB)
        errors: list[BaseException] = []

        def work(i: int) -> None:
            mine = self.space(made.regions, self.device)
            random = np.random.default_rng(i)
            try:
                for _ in range(20):
                    data = random.integers(0, 256, (16, 4096), dtype=np.uint8)
                    at = i * MIB + random.permutation(MIB // 4096)[:16] * 4096
                    mine.scatter(0, at, data)
                    back = np.empty_like(data)
                    mine.gather(0, at, back)
                    assert np.array_equal(back, data)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.patience_s)
            assert not thread.is_alive(), "a thread waits for ever"
        assert not errors, errors[0]
        assert np.array_equal(rows_of(made, 0, 3 * MIB, MIB), content[3 * MIB :])

    def test_it_says_whether_pages_are_remapped(self) -> None:
        """``remaps`` returns whether pages may be replaced under a region; those that it allocates keep theirs."""
        assert self.space.remaps(self.space.allocate(4096, self.device).region) is False


def _row(nbytes: int, at: int) -> CopyPlan:
    """Return a plan that moves these bytes of one region to the same place in another, as one row."""
    zero, place = np.zeros(1, np.int64), np.full(1, at, np.int64)
    return CopyPlan((StridedCopy(CopyPattern(zero, zero, (), nbytes), place, place, np.ones(1, np.int64)),))


def _whole(nbytes: int) -> CopyPlan:
    """Return a plan that moves all of one region into another of its size, as rows of 64 KiB."""
    row = 65536
    places = np.arange(nbytes // row, dtype=np.int64) * row
    zero = np.zeros(1, np.int64)
    return CopyPlan((StridedCopy(CopyPattern(zero, zero, (), row), places, places, np.ones(len(places), np.int64)),))
