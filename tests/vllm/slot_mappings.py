"""vLLM's kernel that gives tokens their slots, under Triton's interpreter, beside a rank's turns; run by ``test_turns.py``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
from vllm.v1.worker import block_table

from tests.geometry.layouts import dealt

TOKENS = 150


def expected(blocks: list[int], size: int, rank: int, ranks: int, span: int) -> list[int]:
    own = dealt(rank, ranks, span)
    at = [own.get(t) for t in range(TOKENS)]
    return [-1 if i is None else blocks[i // size] * size + i % size for i in at]


def interpreted(kernel: Any) -> Any:
    """A kernel that vLLM has left as a plain function, since there is no GPU."""
    plain = getattr(kernel, "fn", kernel)
    plain.__globals__["tl"], plain.__globals__["triton"] = triton.language, triton
    return triton.jit(plain)


KERNEL = interpreted(block_table.ComputeSlotMappingKernel.kernel)
TWO_SIZES = "BLOCKS_PER_KV_BLOCK" in KERNEL.arg_names
"""Whether the kernel tells the blocks of attention kernels from those of the cache, as in 0.31; they are equal here."""


def slots(blocks: list[int], size: int, rank: int, ranks: int, span: int) -> list[int]:
    out = torch.full((TOKENS + 3,), 7, dtype=torch.int64)
    table = torch.tensor([blocks], dtype=torch.int32)
    KERNEL[(2,)](
        TOKENS,
        TOKENS + 3,
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.arange(TOKENS),
        table,
        table.stride(0),
        *([size] if TWO_SIZES else []),
        out,
        KV_CACHE_BLOCK_SIZE=size,
        TOTAL_CP_WORLD_SIZE=ranks,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=span,
        PAD_ID=-1,
        BLOCK_SIZE=64,
        **({"BLOCKS_PER_KV_BLOCK": 1} if TWO_SIZES else {}),
    )
    return out[:TOKENS].tolist()


def main() -> None:
    n = 0
    for size, ranks, span in itertools.product((8, 16), (1, 2, 3, 4), (1, 2, 8)):
        blocks = [(5 * i + 3) % 23 for i in range(TOKENS // size + 1)]
        for rank in range(ranks):
            assert slots(blocks, size, rank, ranks, span) == expected(blocks, size, rank, ranks, span)
            n += 1
    print(n, "slots as described")


if __name__ == "__main__":
    main()
