"""One Triton kernel: move every row of a sheet between places in memory and the packed stream, in either direction.

A row is at ``cells[c] + places[s] + i * stride1 + j * stride2`` in the cache; in the stream it is at
``stream + base[s] + row * size[s]`` where ``size[s]`` is the bytes of each row in segment s. All layers and blocks go
in one launch. Imported only where CUDA and Triton are.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["move_rows"]


@triton.jit
def move_rows(
    cells,  # *int64 [cells]: absolute address of each cell
    segments,  # *int64 [3, segments]: place of the segment, base in the stream, words in each of its rows
    stream,  # int64: absolute address of the packed stream
    n_segments,
    n_rows,
    n1,
    stride1,
    n2,
    stride2,
    WORD: tl.constexpr,  # bytes of a word: 8, 4, 2 or 1
    ROWS: tl.constexpr,  # rows a program moves at once
    WORDS: tl.constexpr,  # words of each that it moves at once
    ALIGNED: tl.constexpr,  # all addresses, strides and sizes are multiples of 16 bytes
    PACK: tl.constexpr,  # cache to stream, else stream to cache
):
    tiles = tl.cdiv(n_rows, ROWS)
    for job in range(tl.program_id(0), n_segments * tiles, tl.num_programs(0)):
        segment, tile = job // tiles, job % tiles
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < n_rows
        cell = row // (n1 * n2)
        inner = row % (n1 * n2)
        place = tl.load(segments + segment)
        base = tl.load(segments + n_segments + segment)
        words = tl.load(segments + 2 * n_segments + segment)
        at = tl.load(cells + cell, mask=there, other=0) + place
        at += (inner // n2).to(tl.int64) * stride1 + (inner % n2).to(tl.int64) * stride2
        packed = stream + base + row.to(tl.int64) * words * WORD
        for first in range(0, words, WORDS):
            word = first + tl.arange(0, WORDS)
            mask = there[:, None] & (word < words)[None, :]
            a = at[:, None] + (word * WORD)[None, :].to(tl.int64)
            b = packed[:, None] + (word * WORD)[None, :].to(tl.int64)
            if WORD == 8:
                x, y = a.to(tl.pointer_type(tl.int64)), b.to(tl.pointer_type(tl.int64))
            elif WORD == 4:
                x, y = a.to(tl.pointer_type(tl.int32)), b.to(tl.pointer_type(tl.int32))
            elif WORD == 2:
                x, y = a.to(tl.pointer_type(tl.int16)), b.to(tl.pointer_type(tl.int16))
            else:
                x, y = a.to(tl.pointer_type(tl.int8)), b.to(tl.pointer_type(tl.int8))
            if ALIGNED:
                x = tl.max_contiguous(tl.multiple_of(x, [1, 16]), [1, WORDS])
                y = tl.max_contiguous(tl.multiple_of(y, [1, 16]), [1, WORDS])
            if PACK:
                tl.store(y, tl.load(x, mask=mask), mask=mask)
            else:
                tl.store(x, tl.load(y, mask=mask), mask=mask)
