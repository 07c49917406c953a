"""Blocks copied within a worker's cache: all bytes of what both tables name, and no other."""

from __future__ import annotations

import pytest
import torch

from kvxfer.geometry import Cache, Group, Heads, Region, View
from kvxfer.values import NULL, BlockTable
from kvxfer_vllm.copying import BlockCopier

LAYERS, BLOCKS, TOKENS, HEADS = 3, 7, 4, 2


@pytest.mark.parametrize("unit", [8, 6, 3])
@pytest.mark.parametrize("order", ["LBTH", "BLTH", "LBHT", "uneven"])
def test_what_is_named_is_copied_and_nothing_else(unit: int, order: str) -> None:
    sizes = {"L": LAYERS, "B": BLOCKS, "T": TOKENS, "H": HEADS}
    step, strides = unit, {}
    for axis in reversed("LBTH" if order == "uneven" else order):
        strides[axis] = step
        step *= sizes[axis]
    memory = torch.randint(0, 255, (step + 64,), dtype=torch.uint8)
    offsets = [i * strides["L"] + (16 if order == "uneven" and i == 2 else 0) for i in range(LAYERS)]
    view = View(
        "kv",
        1,
        ("a", "b", "c"),
        tuple(offsets),
        BLOCKS,
        strides["B"],
        unit,
        "x",
        Heads(0, HEADS, HEADS, strides["H"]),
        strides["T"],
    )
    cache = Cache((Region(memory.data_ptr(), memory.nbytes),), (Group(TOKENS), Group(TOKENS)), (view,))
    pairs = {1: 5, 4: 0}
    expected = memory.clone()
    for offset in offsets:
        for src, dst in pairs.items():
            for t in range(TOKENS):
                for h in range(HEADS):
                    at = offset + t * strides["T"] + h * strides["H"]
                    here, there = at + src * strides["B"], at + dst * strides["B"]
                    expected[there : there + unit] = memory[here : here + unit]
    copier = BlockCopier([memory], cache)
    copier.copy(BlockTable.of([[2], [NULL, 1, 6, 4]]), BlockTable.of([[NULL], [3, 5, NULL, 0, 2]]))
    assert torch.equal(memory, expected)
