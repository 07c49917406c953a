"""``kvxfer bench transfer`` and ``kvxfer bench load`` between two processes."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer_bench.transfer.engine import pair
from kvxfer_bench.transfer.shapes import MODELS, Request

PAGES = MODELS["pages-of-16k"]
CONFIG = Config(backend="zmq", staging_bytes=16 << 20)


def test_each_round_is_timed_and_wrong_bytes_are_told() -> None:
    request = Request(PAGES, 16 * 8)
    with pair(CONFIG, PAGES, request.blocks, ("cpu", "cpu")) as both:
        both.connect()
        times, said = both.move(request.src, request.dst, 3)
        assert len(times) == 3 and all(0 < t < 30 for t in times) and said["bytes"] == 8 << 14
        both.expect(request.dst, request.src, "good")
        with pytest.raises(KvxferError, match="the bad run delivered wrong bytes"):
            both.expect(request.dst, np.roll(request.src, 1), "bad")
