"""Why servers of LFM 2 and MLA on CPUs are tested with torch's rotation of queries and keys (``tests.e2e.models.EXACT_POSITIONS``)."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops

TOKENS, HEADS, SIZE = 5, 2, 32
WRONG = pytest.mark.xfail(
    strict=True, reason="vLLM 0.32 takes heads for tokens; where it does not, EXACT_POSITIONS can go"
)


@pytest.mark.parametrize("shape", [(TOKENS, HEADS * SIZE), pytest.param((TOKENS, HEADS, SIZE), marks=WRONG)])
def test_the_operator_for_cpus_rotates_a_key_by_its_position(shape: tuple[int, ...]) -> None:
    positions = torch.arange(TOKENS)
    angles = positions[:, None] / 10000 ** (torch.arange(0, SIZE, 2) / SIZE)
    key = torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    a, b = key.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    given = key.clone().view(shape)
    ops.rotary_embedding(positions, given.clone(), given, SIZE, torch.cat([angles.cos(), angles.sin()], dim=-1), True)
    torch.testing.assert_close(given.view_as(expected), expected)
