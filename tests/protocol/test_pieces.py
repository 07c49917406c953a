"""Into how many pieces of what size a staged part is cut."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.geometry import Cache, Group, Planner, Rank, Region, View, route
from kvxfer.protocol.parts import MIN_PIECE, piece_bytes, plan_part
from kvxfer.protocol.values import LinkInfo
from kvxfer.values import BlockTable

MIB, LAYERS, BLOCK_BYTES = 1 << 20, 32, 1 << 16
IDS = np.random.default_rng(1).permutation(512)


def planner(device: str) -> Planner:
    """Caches of 1 GiB in which each block of a layer has 64 KiB."""
    offsets = tuple(layer * len(IDS) * BLOCK_BYTES for layer in range(LAYERS))
    names = tuple(f"layer.{layer}" for layer in range(LAYERS))
    unit = BLOCK_BYTES // 16
    view = View("kv", 0, names, offsets, len(IDS), BLOCK_BYTES, unit, "test", token_stride=unit)
    region = Region(1 << 32, LAYERS * len(IDS) * BLOCK_BYTES, device)
    src, dst = (Cache((region,), (Group(16),), (view,), Rank()) for _ in range(2))
    return Planner(src, dst, route([src], [dst])[Rank()].assignments[Rank()])


@pytest.mark.parametrize(
    ("device", "part", "slot", "piece"),
    [
        ("cpu", 128 * MIB, 16 * MIB, 16 * MIB),  # long: by the slot
        ("cpu", 16 * MIB, 16 * MIB, 8 * MIB),  # short: two, so that packing, moving and unpacking overlap
        ("cpu", 4 * MIB, 16 * MIB, MIN_PIECE),
        ("cuda:0", 1024 * MIB, 128 * MIB, 128 * MIB),
        ("cuda:0", 128 * MIB, 128 * MIB, 128 * MIB),  # short: one, as each costs the host more time than it could save
        ("cuda:0", 64 * MIB, 128 * MIB, 64 * MIB),
        ("cuda:0", 128 * MIB, 64 * MIB, 64 * MIB),
    ],
)
def test_the_size_of_a_piece(device: str, part: int, slot: int, piece: int) -> None:
    plans = planner(device)
    blocks = part // (LAYERS * BLOCK_BYTES)
    table = BlockTable.of([IDS[:blocks]])
    plan = plan_part(plans, table, table, 0, 16 * blocks, 0, 16 * blocks, True)
    assert plan.nbytes == part
    assert piece_bytes(plan, LinkInfo("read", plans, piece_bytes=slot, stage_below=1 << 30)) == piece
    assert piece_bytes(plan, LinkInfo("read", plans, piece_bytes=slot)) == 0, "straight"
