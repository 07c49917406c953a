"""``kvxfer bench descriptors``: NIXL's ways to name the rows of a transfer."""

from __future__ import annotations

import pytest

from kvxfer_bench.descriptors import name_rows
from tests.conftest import require


@pytest.mark.timeout(120)
def test_each_way_moves_and_is_timed() -> None:
    require("nixl")
    found = name_rows("cpu", layers=4, rows=32, row_bytes=4096, repeat=2)
    assert found["rows"] == 32
    for way in ("listed", "prepared", "strided"):
        assert found[way]["make_us"] > 0 < found[way]["move_us"], way
    assert found["listed"]["setup_us"] == 0 < found["strided"]["setup_us"]
