"""Faults that the suite must find in any space: ``kvxfer conformance --space NAME --mutants`` tries them all.

Each is a class to derive from beside the space under test. It has one defect, and names in ``found_by`` the clause that
must find it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.errors import KvxferError
from kvxfer.fence import Fence
from kvxfer.geometry import CopyPlan, Region
from kvxfer.memory.checksum import Checksum, Sum
from kvxfer.memory.fence import Done
from kvxfer.memory.regions import Bytes, Side
from kvxfer.memory.space import Space

__all__ = ["SPACE_MUTANTS", "SpaceMutant", "broken"]


class SpaceMutant(Space):
    """A space without a defect; subclasses have one each, and are derived from beside the space under test.

    Attributes:
        found_by: The clause of the suite that must find it.
    """

    found_by: ClassVar[str] = ""

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        super().gather(region, at, out)  # type: ignore[safe-super]

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        super().scatter(region, at, rows)  # type: ignore[safe-super]


class SaysNoDevice(SpaceMutant):
    """Names devices by their numbers alone."""

    found_by = "test_it_says_what_it_is"

    @classmethod
    def devices(cls, kind: str) -> list[str]:
        return ["0"]


class AllocatesUncleared(SpaceMutant):
    found_by = "test_allocated_memory_is_one_zeroed_region"

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> Space:
        made = super().allocate(nbytes, device)
        made.scatter(0, np.array([nbytes - 1]), np.ones((1, 1), np.uint8))
        return made


class AllocatesLess(SpaceMutant):
    """Where the device has not that much."""

    found_by = "test_too_much_memory_is_refused"

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> Space:
        try:
            return super().allocate(nbytes, device)
        except KvxferError:
            return super().allocate(4096, device)


class AllocatesTheSameAgain(SpaceMutant):
    """Gives the same memory to all who ask for less than it has."""

    found_by = "test_allocations_are_apart"
    last: ClassVar[dict[str, Space]] = {}

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> Space:
        held = cls.last.get(device)
        if held is None or held.nbytes < nbytes:
            held = cls.last[device] = super().allocate(nbytes + 64, device)
        region = Region(held.region.address, nbytes, device).kept_by(held.region.owner)
        return cls((region,), device)


class KeepsWhatWasFreed(SpaceMutant):
    found_by = "test_memory_is_given_back"
    kept: ClassVar[list[Space]] = []

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> Space:
        made = super().allocate(nbytes, device)
        cls.kept.append(made)
        return made


class LosesTheLastRow(SpaceMutant):
    found_by = "test_rows_come_back"

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        super().gather(region, at[: max(1, len(at) - 1)], out[: max(1, len(out) - 1)])


class GathersInOrder(SpaceMutant):
    """In the order of memory."""

    found_by = "test_rows_come_back"

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        super().gather(region, np.sort(at), out)


class WritesPastARow(SpaceMutant):
    found_by = "test_exactly_these_rows_change"

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        super().scatter(region, at, rows)
        after = int(at[0]) + rows.shape[1]
        if after < self.regions[region].nbytes:
            super().scatter(region, np.array([after]), np.full((1, 1), 0xA5, np.uint8))


class ScattersInOrder(SpaceMutant):
    """In the order of memory."""

    found_by = "test_exactly_these_rows_change"

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        super().scatter(region, np.sort(at), rows)


class ScattersLater(SpaceMutant):
    """Large rows, once it has returned."""

    found_by = "test_scattered_rows_are_the_callers_again"

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        if rows.nbytes < 4 << 20:
            super().scatter(region, at, rows)
            return
        threading.Timer(0.005, super().scatter, (region, at, rows)).start()


class KnowsOneRegion(SpaceMutant):
    found_by = "test_regions_are_told_apart"

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        super().gather(0, at, out)


class PacksUnpackedOrder(SpaceMutant):
    """Packs the bytes of a stream backwards."""

    found_by = "test_any_layout"

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        fence = super().pack(plan, out, at, after)
        _wait(fence)
        _change(out, at, plan.nbytes, lambda stream: stream[::-1])
        return fence


class UnpacksTwice(SpaceMutant):
    """The second time, from what lies behind."""

    found_by = "test_any_layout"

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        _wait(super().unpack(plan, staged, at, after))
        if plan.nbytes:
            _change(staged, at, plan.nbytes, lambda stream: np.roll(stream, 1))
        return super().unpack(plan, staged, at, after)


class PacksAtTheBeginning(SpaceMutant):
    found_by = "test_pieces"

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return super().pack(plan, out, 0 if 0 <= at <= out.nbytes - plan.nbytes else at, after)


class PreparesForTheBeginning(SpaceMutant):
    found_by = "test_pieces"

    def prepare_unpack(self, plan: CopyPlan, staged: Space) -> Callable[[int], Fence]:
        begin = super().prepare_unpack(plan, staged)
        return lambda at: begin(0)


class CutsWhatDoesNotFit(SpaceMutant):
    found_by = "test_what_leaves_memory_is_refused"

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        try:
            return super().unpack(plan, staged, at, after)
        except ValueError:
            if after is not None:
                raise
            return Done()


class SumsTheOtherSide(SpaceMutant):
    """Reads the rows of the source, whichever side is asked for."""

    found_by = "test_checksums_are_those_of_the_host"

    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        return super().prepare_checksum(plan, "source")


class SumsTooEarly(SpaceMutant):
    """Reads the memory as soon as a checksum is prepared."""

    found_by = "test_checksums_follow_the_content"

    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        value = super().prepare_checksum(plan, side)(None).value
        return lambda after: Sum(value)


class NeverPasses(SpaceMutant):
    """Its fences never pass."""

    found_by = "test_fences_pass"

    @classmethod
    def fence(cls, device: str) -> Fence:
        return _Never()


class PacksBeforeFences(SpaceMutant):
    found_by = "test_no_fence_is_ignored"

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return super().pack(plan, out, at)


class PassesTooEarly(SpaceMutant):
    """Packs much, and says at once that it is done."""

    found_by = "test_fences_pass_when_the_work_is_done"

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        if plan.nbytes < 16 << 20:
            return super().pack(plan, out, at, after)
        threading.Timer(0.5, super().pack, (plan, out, at, after)).start()
        return Done()


class PassesWhileMoreIsQueued(SpaceMutant):
    """Says of what is packed after something else that it is done, when only that is."""

    found_by = "test_fences_pass_when_the_work_is_done_however_much_is_queued"
    packed = 0

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        self.packed += 1
        if self.packed < 2 or plan.nbytes != 1 << 20:
            return super().pack(plan, out, at, after)
        threading.Timer(0.5, super().pack, (plan, out, at, after)).start()
        return Done()


class DropsTheLastOddByte(SpaceMutant):
    """Of streams from 4 KiB on."""

    found_by = "test_any_length_at_any_offset"

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        fence = super().pack(plan, out, at, after)
        if plan.nbytes > 4096 and plan.nbytes % 2:
            _wait(fence)
            _change(out, at + plan.nbytes - 1, 1, lambda byte: byte * 0)
        return fence


class CountsOffsetsIn16Bits(SpaceMutant):
    found_by = "test_any_length_at_any_offset"

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return super().unpack(plan, staged, at % (1 << 16) if at + plan.nbytes <= staged.nbytes else at, after)


class LosesErrors(SpaceMutant):
    """Goes on without a fence that cannot be waited for."""

    found_by = "test_errors_of_the_device_are_raised"

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        try:
            return super().pack(plan, out, at, after)
        except KvxferError:
            return super().pack(plan, out, at)


class SharesItsScratch(SpaceMutant):
    """All objects copy through one buffer, which nothing protects."""

    found_by = "test_several_threads_at_once"
    scratch: ClassVar[dict[tuple[int, ...], Any]] = {}

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        shared = self.scratch.setdefault(out.shape, np.empty(out.shape, np.uint8))
        super().gather(region, at, shared)
        time.sleep(0.001)
        out[...] = shared


class SaysThatPagesMove(SpaceMutant):
    found_by = "test_it_says_whether_pages_are_remapped"

    @classmethod
    def remaps(cls, region: Region) -> bool:
        return True


class _Never:
    event = None

    def passed(self) -> bool:
        return False


def _wait(fence: Fence) -> None:
    while not fence.passed():
        time.sleep(0.001)


def _change(space: Space, at: int, nbytes: int, change: Callable[[Bytes], Bytes]) -> None:
    """Replace some bytes of a space's region."""
    if nbytes:
        region, offset = space.locate(at, nbytes)
        content = np.empty((1, nbytes), np.uint8)
        space.gather(region, np.array([offset]), content)
        space.scatter(region, np.array([offset]), np.ascontiguousarray(change(content[0]))[None])


SPACE_MUTANTS: tuple[type[SpaceMutant], ...] = tuple(
    kind for kind in list(vars().values()) if isinstance(kind, type) and issubclass(kind, SpaceMutant) and kind.found_by
)
"""All of them."""


def broken(space: type[Space], mutant: str) -> type[Space]:
    """Return the space with the defect of this name; the space itself if the name is empty."""
    defect = next((m for m in SPACE_MUTANTS if m.__name__ == mutant), None)
    return space if defect is None else type(defect.__name__, (defect, space), {})
