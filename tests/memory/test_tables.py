"""Tables that a device reads are not written to before it has."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvxfer.memory.cuda.tables import Tables  # noqa: E402  (needs torch)
from kvxfer.testing.conformance.fences import HostFence  # noqa: E402


def test_a_table_is_used_again_once_it_has_been_read() -> None:
    tables, fences = Tables(pinned=False), [HostFence(), HostFence()]
    first = tables.take(3)
    tables.give([first], fences[0])
    second = tables.take(3)
    assert second is not first
    tables.give([second], fences[1])
    assert tables.take(3) not in (first, second)
    fences[0].open = True
    assert tables.take(3) is first
    assert tables.take(3) not in (first, second)
    fences[1].open = True
    assert tables.take(3) is second


@pytest.mark.parametrize("segments", [1, 511, 512, 513, 5000])
def test_a_table_has_room(segments: int) -> None:
    tables, fence = Tables(pinned=False), HostFence()
    fence.open = True
    tables.give([tables.take(1)], fence)
    table = tables.take(segments)
    assert table.columns.shape == (3, table.pitch) and table.pitch >= segments
    table.columns[:, :segments] = 7
    assert int(table.tensor[:, :segments].sum()) == 3 * 7 * segments
