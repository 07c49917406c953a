"""From plans to kernel launches: tables for the device, sizes of tiles.

Needs torch and Triton, but no CUDA: under Triton's interpreter the same runs on host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from math import gcd, inf
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvxfer import clock
from kvxfer.block_table import Ints
from kvxfer.fence import Fence
from kvxfer.geometry import CopyPattern, CopyPlan, LogicalCopy, StridedCopy, ViewGroup
from kvxfer.memory.checksum import HEAD, LENGTH, cell_keys, fine, next_token, spans, word_keys
from kvxfer.memory.cuda.tables import Table, Tables
from kvxfer.memory.fence import Done, Events
from kvxfer.memory.regions import Side
from kvxfer.memory.space import Space
from kvxfer.memory.triton_kernels import digest_rows, move_rows

_TILE, _WARPS = 1 << 12, 16
"""Words of 8 bytes that a program moves at once, 64 bytes a lane, and its warps."""

_SHARE = 2
"""Multiprocessors for each program that moves. Half of them pack faster than a link moves. On all of them, packing
would slow what brings packed pieces to another GPU meanwhile: NCCL's kernels and copy engines."""

_HASHED, _HASHED_WARPS, _HASHERS = 1 << 11, 2, 8
"""Words and warps of a program that hashes, and how many of those a multiprocessor gets."""

_HASHED_WORDS = 16
"""Words of a row that are hashed at once. Few, so that few lanes share a row: each of them works out where it is."""

_LONG = 1 << 14
"""Bytes of a row from which on the time to read where it is does not matter beside the time to move it."""

_SPAN = 1 << 16
"""Bytes of a row that one job moves, so that few long rows keep many programs busy."""

QUICK_S = 0.001
"""Seconds without a launch after which the next one is slow: what it needs has left the processor's caches."""


@dataclass(frozen=True, eq=False)
class _Launch:
    """The launch of one strided copy, complete except for the address of the packed stream."""

    nbytes: int  # bytes to move
    table: Table  # the segments, in host memory
    cells: Any  # offsets of the cells, on the device
    near: Any  # the segments where the kernel reads them
    segments: int  # number of segments
    rows: int  # rows of a segment
    axes: tuple[int, ...]  # length and stride of the two axes
    longest: int  # bytes of the longest row
    grain: int  # power of two that divides all places and sizes
    pack: bool  # whether to move into the packed stream


class Launcher:
    """Launches kernels for one space, on one stream. Used by one thread at a time.

    ``processors`` are the multiprocessors of its device; ``stream`` is ``None`` under the interpreter, where all is done on return.
    """

    def __init__(self, space: Space, processors: int, stream: Any = None) -> None:
        self._space, self._processors, self._stream = space, processors, stream
        self._device = torch.device(space.device)
        # All addresses are taken from a multiple of 16, so that what is aligned there is aligned.
        self._memory = space.regions[0].address // 16 * 16 if space.regions else 0
        self._moved = np.array([r.address - s - self._memory for r, s in zip(space.regions, space.starts, strict=True)])
        self._cells: WeakKeyDictionary[CopyPattern, dict[Side, tuple[Any, int, list[int]]]] = WeakKeyDictionary()
        self._units: WeakKeyDictionary[ViewGroup, dict[int, tuple[CopyPattern, Any]]] = WeakKeyDictionary()
        self._factors: dict[int, Any] = {}
        self._compiled: dict[tuple[int, ...], Any] = {}
        self._tables = Tables(pinned=stream is not None)
        self._events = Events()
        self._last = -inf  # when something was launched

    def move(self, plan: CopyPlan, side: Side, packed: int, *, pack: bool) -> Fence:
        """Move bytes between the rows of a plan on one side and the packed stream at this address.

        Raises:
            ValueError: A row would leave its region.
        """
        return self.begin(self.prepare(plan, side, pack=pack), packed)

    def prepare(self, plan: CopyPlan, side: Side, *, pack: bool) -> list[_Launch]:
        """Do what ``move`` does before its first launch. ``begin`` takes the result, once.

        Raises:
            ValueError: A row would leave its region.
        """
        return [self._prepare(strided, side, pack) for strided in plan.copies]

    def rehearse(self, launches: Sequence[_Launch], packed: int) -> None:
        """Launch these kernels with nothing to move, unless there was a launch just now.

        What must be compiled is compiled then, and the next launch is quick.
        """
        if clock.now() < self._last + QUICK_S:
            return
        for launch in launches:
            self._start(launch, packed, empty=True)
        self._mark()

    def begin(self, launches: Sequence[_Launch], packed: int) -> Fence:
        """Move what was prepared, between its rows and the packed stream at this address."""
        try:
            for launch in launches:
                self._start(launch, packed)
                packed += launch.nbytes
            fence = self._mark()
        except Exception:
            if self._stream is not None:
                self._stream.synchronize()  # copies that were begun, which read tables
            raise
        self._tables.give([launch.table for launch in launches], fence)
        return fence

    def _prepare(self, strided: StridedCopy, side: Side, pack: bool) -> _Launch:
        pattern, places, n = (
            strided.pattern,
            strided.src_at if side == "source" else strided.dst_at,
            len(strided.counts),
        )
        n_rows = len(pattern)
        table = self._tables.take(n)
        place, begin, size = table.columns[:, :n]
        place[:] = places
        np.multiply(strided.counts, pattern.unit, out=size)
        np.add.accumulate(size[:-1] * n_rows, out=begin[1:])
        begin[0] = 0
        cells, grain = self._cells_of(pattern, side, places, size)
        longest = int(size.max())
        return _Launch(
            strided.nbytes,
            table,
            cells,
            self._near(table, longest),
            n,
            n_rows,
            _axes(pattern, side),
            longest,
            gcd(grain, _grain(places), _grain(size)),
            pack,
        )

    def _start(self, launch: _Launch, packed: int, *, empty: bool = False) -> None:
        """Launch one kernel.

        For each launch Triton looks at every argument, to find the variant that was compiled for such arguments. The
        variants of this kernel differ in constants and in which numbers are wide, so it is looked up by these alone.
        """
        longest, axes, n_rows = launch.longest, launch.axes, launch.rows
        unit = gcd(launch.grain, packed)
        words = _power(min(_TILE, longest // min(unit, 8)))
        rows = _TILE // words
        spans = -(-longest // _SPAN)
        programs = min(launch.segments * -(-n_rows // rows) * spans, max(1, self._processors // _SHARE))
        numbers = (
            launch.cells,
            launch.near,
            launch.table.pitch,
            self._memory,
            packed,
            0 if empty else launch.segments,
            n_rows,
            *axes,
            spans,
            -(-longest // unit // spans),
        )
        constants = unit, rows, words, launch.pack
        wide = tuple(x.bit_length() > 31 for x in (self._memory, packed, axes[1], axes[3]))
        compiled = self._compiled.get(constants + wide)
        if compiled is not None:
            compiled[programs, 1, 1](*numbers, *constants, stream=self._stream.cuda_stream)
            return
        with self._on_stream():
            compiled = move_rows[(programs,)](*numbers, *constants, num_warps=_WARPS)
        self._compiled[constants + wide] = compiled  # None under the interpreter

    def _near(self, table: Table, longest: int) -> Any:
        """Return the table where a kernel should read it.

        For long rows that is where the host wrote it: a copy would cost the host as much as a launch. For short rows it
        is the device: the kernel would wait for the bus most of the time.
        """
        if longest >= _LONG or self._stream is None:
            return table.tensor
        with self._on_stream():
            return table.tensor.to(self._device, non_blocking=True)

    def _mark(self) -> Fence:
        self._last = clock.now()
        return Done() if self._stream is None else self._events.record(self._stream)

    def digests(self, part: LogicalCopy, side: Side, out: Any) -> Iterator[Callable[[], Any]]:
        """Yield launches that add the checksum of a logical copy, read on one side, to int64 ``out[0]`` on the device; call each once."""
        view_group = part.view_group
        for tokens, places, first in spans(part, side):
            units, keys = self._units_of(view_group, tokens)
            size = np.full(len(places), view_group.unit, np.int64)
            cells, grain = self._cells_of(units, side, places, size)
            n_words, n_rows = -(-view_group.unit // 8), len(units)
            unit = gcd(grain, _grain(places), 16)
            words = _power(min(_HASHED_WORDS, n_words))
            rows = _HASHED // words
            (n1, stride1), (n2, stride2) = ((n, s if side == "source" else d) for n, s, d in units.axes)
            kernel = digest_rows[(min(len(places) * -(-n_rows // rows), self._processors * _HASHERS),)]
            yield partial(
                kernel,
                cells,
                keys,
                self._upload(places, first.view(np.int64)),
                self._factors_of(2 * n_words),
                self._memory,
                out,
                len(places),
                n_rows,
                n1,
                stride1,
                _signed(HEAD),
                n2,
                stride2,
                _signed(int(next_token(view_group))),
                view_group.unit,
                _signed(view_group.unit * LENGTH),
                UNIT=unit if unit >= 8 else 1,
                ROWS=rows,
                WORDS=words,
                num_warps=_HASHED_WARPS,
            )

    def _cells_of(self, pattern: CopyPattern, side: Side, places: Ints, size: Ints) -> tuple[Any, int]:
        """Return a pattern's cells on the device, and the power of two that divides them and all strides.

        Raises:
            ValueError: At these places some row leaves its region.
        """
        sides = self._cells.setdefault(pattern, {})
        if side not in sides:
            at = pattern.src_cells if side == "source" else pattern.dst_cells
            strides = [s if side == "source" else d for _, s, d in pattern.axes]
            region = self._space.of_cells(at)
            begins = np.array(self._space.starts, np.int64)[region]
            ends = begins + np.array([r.nbytes for r in self._space.regions], np.int64)[region]
            reach = sum((n - 1) * s for (n, _, _), s in zip(pattern.axes, strides, strict=True))
            room = [int((begins - at).max()), int((ends - at).min()) - reach]
            near = at + self._moved[region]
            grain = reduce(gcd, [_grain(near), pattern.unit, *strides])
            with self._on_stream():
                sides[side] = torch.from_numpy(near).to(self._device), grain, room
        table, grain, (least, most) = sides[side]
        if int(places.min()) < least or int((places + size).max()) > most:
            raise ValueError("the plan leaves the regions of this space")
        return table, grain

    def _units_of(self, view_group: ViewGroup, tokens: int) -> tuple[CopyPattern, Any]:
        by_tokens = self._units.setdefault(view_group, {})
        if tokens not in by_tokens:
            keys = cell_keys(view_group) + np.uint64(view_group.first_head * HEAD % (1 << 64))
            by_tokens[tokens] = fine(view_group, tokens), torch.from_numpy(keys.view(np.int64)).to(self._device)
        return by_tokens[tokens]

    def _factors_of(self, n_words: int) -> Any:
        size = _power(n_words)
        if size not in self._factors:
            self._factors[size] = torch.from_numpy(word_keys(size).view(np.int64)).to(self._device)
        return self._factors[size]

    def _on_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _upload(self, *columns: Ints) -> Any:
        return torch.from_numpy(np.stack(columns)).to(self._device, non_blocking=True)


def _axes(pattern: CopyPattern, side: Side) -> tuple[int, ...]:
    """Return (n1, stride1, n2, stride2) of a pattern of at most two axes."""
    axes = [(n, s if side == "source" else d) for n, s, d in pattern.axes]
    (n1, stride1), (n2, stride2) = [(1, 0)] * (2 - len(axes)) + axes
    return n1, stride1, n2, stride2


def _grain(values: Ints) -> int:
    """Return the largest power of two up to 16 that divides all values."""
    bits = int(np.bitwise_or.reduce(values)) | 16
    return bits & -bits


def _power(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def _signed(x: int) -> int:
    """Return a 64-bit number as kernels take it."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)
