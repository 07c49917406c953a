"""Blocks copied within a worker's cache: all bytes of what both tables name, and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.geometry import Cache, Group, Heads, Region, View
from kvxfer.values import NULL, BlockTable
from kvxfer_vllm import copying
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


def test_a_device_gathers_no_more_at_once_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own way, here on the CPU's tensors: however many blocks there are, in pieces, the last of them shorter."""
    plane = torch.arange(3 * 40 * 7, dtype=torch.int64).reshape(3, 40, 7)
    src, dst = np.array([1, 5, 9, 2, 30, 31, 32]), np.array([10, 11, 12, 13, 14, 15, 39])
    expected = plane.clone()
    expected[:, dst] = plane[:, src]
    bound, gathered, select = 2 * plane[:, 0].nbytes, [], torch.Tensor.index_select

    def measured(*args: Any) -> torch.Tensor:
        gathered.append(select(*args))
        return gathered[-1]

    monkeypatch.setattr(copying, "DEVICE_BYTES", bound)
    monkeypatch.setattr(torch.Tensor, "index_select", measured)
    copying._copy_on_device(plane, src, dst)
    assert torch.equal(plane, expected)
    assert [piece.nbytes for piece in gathered] == [bound, bound, bound, bound // 2]
