"""NCCL by itself, for ``kvxfer bench transfer``: one communicator, groups of one operation a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvxfer.geometry.plan import Ints
from kvxfer.geometry.region import Region
from kvxfer_nccl.binding import PipeSpec
from kvxfer_nccl.library import load
from kvxfer_nccl.options import Options

__all__ = ["NcclRaw"]

GROUPED = 16384
"""Operations of a group at most. One of 65,536 comes to no end: both sides are busy, and neither GPU is."""


class NcclRaw:
    """Fulfils ``kvxfer_bench.raw.Raw``."""

    two_sided = True

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None:
        self._binding = load()
        self._sends, self._region, self._options = sends, region, Options.parse(options)
        self._id = self._binding.unique_id() if self._sends else b""

    def endpoint(self) -> bytes:
        return self._id

    def connect(self, theirs: bytes) -> None:
        spec = PipeSpec(self._id or theirs, self._sends, self._region.device, self._options)
        self._pipe = self._binding.pipe(spec)
        self._pipe.open()

    def move(self, here: Ints, there: Ints, lengths: Ints) -> None:
        runs = list(zip((self._region.address + here).tolist(), lengths.tolist(), strict=True))
        for first in range(0, len(runs), GROUPED):
            self._pipe.move(runs[first : first + GROUPED])
            mark = self._pipe.mark()
            while not mark.passed():
                os.sched_yield()  # where cores are scarce NCCL's own thread may be waiting for this one

    def close(self) -> None:
        self._pipe.abort()
