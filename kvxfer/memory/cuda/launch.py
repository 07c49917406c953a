"""From plans to kernel launches: tables on the device, sizes of tiles. Needs torch and Triton, but no CUDA: under
Triton's interpreter the same runs on host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from math import gcd
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvxfer.geometry import Bundle, CopyPlan, Part, Sheet, Template
from kvxfer.geometry.template import Ints
from kvxfer.memory.checksum import HEAD, LENGTH, TOKEN, cell_keys, fine, spans, word_keys
from kvxfer.memory.space import Side, Space
from kvxfer.memory.triton_kernels import digest_rows, move_rows

__all__ = ["Launcher"]

_TILE, _WARPS = 1 << 10, 4
"""Words of 8 bytes that a program moves at once, 64 bytes a lane, and its warps."""

_HASHED, _HASHED_WARPS = 1 << 11, 2
"""The same where it hashes."""

_HASHED_WORDS = 16
"""Words of a row that are hashed at once. Few, so that few lanes share a row: each of them works out where it is."""

_SPAN = 1 << 16
"""Bytes of a row that one job moves, so that few long rows keep many programs busy."""


@dataclass(frozen=True)
class _Placed:
    """One side of a sheet on the device: what its pieces have in common. ``segments``: int64 ``[3, segments]``, see
    ``move_rows``; ``base``: the second row of it, here. ``grain``: what all addresses, strides and sizes are multiples
    of, up to 16. ``longest``: bytes of its longest row."""

    cells: Any
    segments: Any
    base: Ints
    grain: int
    longest: int


class Launcher:
    """Launches for one space, on torch's current stream. ``programs``: how many run at once, at most."""

    def __init__(self, space: Space, programs: int) -> None:
        self._space, self._programs = space, programs
        self._device = torch.device(space.device)
        # All addresses are taken from a multiple of 16, so that what is aligned there is aligned.
        self._memory = space.regions[0].address // 16 * 16 if space.regions else 0
        self._moved = np.array([r.address - s - self._memory for r, s in zip(space.regions, space.starts, strict=True)])
        self._cells: WeakKeyDictionary[Template, dict[Side, tuple[Any, int, list[int]]]] = WeakKeyDictionary()
        self._placed: WeakKeyDictionary[Sheet, dict[Side, _Placed]] = WeakKeyDictionary()
        self._units: WeakKeyDictionary[Bundle, dict[int, tuple[Template, Any]]] = WeakKeyDictionary()
        self._factors: dict[int, Any] = {}

    def move(self, sheet: Sheet, side: Side, stream: int, *, pack: bool) -> None:
        """Between the sheet's rows on one side and the packed stream at this address.
        Raises ``ValueError`` when a row would leave its region."""
        template, whole = sheet.template, sheet.whole or sheet
        placed = self._place(whole, side)
        stream -= int(placed.base[sheet.first])
        unit = gcd(placed.grain, stream)
        n_segments, n_rows = len(sheet.counts), len(template)
        words = _power(min(_TILE, placed.longest // min(unit, 8)))
        rows = _TILE // words
        spans = -(-placed.longest // _SPAN)
        span = -(-placed.longest // unit // spans)
        jobs = n_segments * -(-n_rows // rows) * spans
        move_rows[(min(jobs, self._programs),)](
            placed.cells, placed.segments, len(placed.base), sheet.first, self._memory, stream, n_segments, n_rows,
            *_axes(template, side), spans, span,
            UNIT=unit, ROWS=rows, WORDS=words, PACK=pack, num_warps=_WARPS,
        )  # fmt: skip

    def place(self, plan: CopyPlan, side: Side) -> None:
        """Put on the device what pieces of a plan have in common. Raises like ``move``."""
        for sheet in plan.sheets:
            self._place(sheet, side)

    def _place(self, sheet: Sheet, side: Side) -> _Placed:
        """A sheet goes to the device once, whatever pieces it is cut into."""
        sides = self._placed.setdefault(sheet, {})
        if side not in sides:
            base, size = sheet.stream()
            places = sheet.src_at if side == "source" else sheet.dst_at
            cells, grain = self._table(sheet.template, side, places, size)
            grain = gcd(grain, _grain(places), _grain(base), _grain(size))
            sides[side] = _Placed(cells, self._upload(places, base, size), base, grain, int(size.max()))
        return sides[side]

    def digests(self, part: Part, side: Side, out: Any) -> Iterator[Callable[[], Any]]:
        """Launches that add the checksum of a part, read on one side, to ``out`` (int64 ``[1]``, on the device), each once."""
        bundle = part.bundle
        for tokens, places, first in spans(part, side):
            units, keys = self._units_of(bundle, tokens)
            size = np.full(len(places), bundle.unit, np.int64)
            cells, grain = self._table(units, side, places, size)
            n_words, n_rows = -(-bundle.unit // 8), len(units)
            unit = gcd(grain, _grain(places), 16)
            words = _power(min(_HASHED_WORDS, n_words))
            rows = _HASHED // words
            (n1, stride1), (n2, stride2) = ((n, s if side == "source" else d) for n, s, d in units.axes)
            kernel = digest_rows[(min(len(places) * -(-n_rows // rows), self._programs),)]
            yield partial(
                kernel, cells, keys, self._upload(places, first.view(np.int64)), self._factors_of(n_words), self._memory, out,
                len(places), n_rows, n1, stride1, _signed(HEAD), n2, stride2, _signed(TOKEN),
                bundle.unit, _signed(bundle.unit * LENGTH),
                UNIT=unit if unit >= 8 else 1, ROWS=rows, WORDS=words, num_warps=_HASHED_WARPS,
            )  # fmt: skip

    def _table(self, template: Template, side: Side, places: Ints, size: Ints) -> tuple[Any, int]:
        """Cells of a template on the device, as bytes from ``memory``, and what all of them and all strides are
        multiples of; checked to stay inside their regions at these places."""
        sides = self._cells.setdefault(template, {})
        if side not in sides:
            at = template.src_cells if side == "source" else template.dst_cells
            strides = [s if side == "source" else d for _, s, d in template.axes]
            region = self._space.of_cells(at)
            begins = np.array(self._space.starts, np.int64)[region]
            ends = begins + np.array([r.nbytes for r in self._space.regions], np.int64)[region]
            reach = sum((n - 1) * s for (n, _, _), s in zip(template.axes, strides, strict=True))
            room = [int((begins - at).max()), int((ends - at).min()) - reach]
            near = at + self._moved[region]
            grain = reduce(gcd, [_grain(near), template.unit, *strides])
            sides[side] = torch.from_numpy(near).to(self._device), grain, room
        table, grain, (least, most) = sides[side]
        if int(places.min()) < least or int((places + size).max()) > most:
            raise ValueError("the plan leaves the regions of this space")
        return table, grain

    def _units_of(self, bundle: Bundle, tokens: int) -> tuple[Template, Any]:
        by_tokens = self._units.setdefault(bundle, {})
        if tokens not in by_tokens:
            keys = cell_keys(bundle) + np.uint64(bundle.first_head * HEAD % (1 << 64))
            by_tokens[tokens] = fine(bundle, tokens), torch.from_numpy(keys.view(np.int64)).to(self._device)
        return by_tokens[tokens]

    def _factors_of(self, n_words: int) -> Any:
        size = _power(n_words)
        if size not in self._factors:
            self._factors[size] = torch.from_numpy(word_keys(size).view(np.int64)).to(self._device)
        return self._factors[size]

    def _upload(self, *columns: Ints) -> Any:
        return torch.from_numpy(np.stack(columns)).to(self._device, non_blocking=True)


def _axes(template: Template, side: Side) -> tuple[int, ...]:
    """(n1, stride1, n2, stride2) of a template of at most two axes."""
    axes = [(n, s if side == "source" else d) for n, s, d in template.axes]
    (n1, stride1), (n2, stride2) = [(1, 0)] * (2 - len(axes)) + axes
    return n1, stride1, n2, stride2


def _grain(values: Ints) -> int:
    """The largest power of two up to 16 that divides all values."""
    bits = int(np.bitwise_or.reduce(values)) | 16
    return bits & -bits


def _power(n: int) -> int:
    """The smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def _signed(x: int) -> int:
    """A 64-bit number as kernels take it."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)
