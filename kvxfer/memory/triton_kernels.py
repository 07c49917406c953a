"""Triton kernels over factored plans: all rows of all segments of a strided copy, all layers included, in one launch.

A row is ``cells[c] + place + i * stride1 + j * stride2`` bytes from ``memory``, for cell ``c`` and steps ``i``, ``j``
of two axes; rows are numbered in that order. Both kernels keep a bounded number of programs busy, each with one job
after the other. Imported only where Triton is; its interpreter does the same arithmetic on host addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_at(cells, place, row, there, n1, stride1, n2, stride2):
    """Return bytes from ``memory`` to each row, int64."""
    inner = row % (n1 * n2)
    cell = tl.load(cells + row // (n1 * n2), mask=there, other=0)
    return cell + place + (inner // n2).to(tl.int64) * stride1 + (inner % n2).to(tl.int64) * stride2


# Numbers are not specialised (is it 1, is it a multiple of 16): each variant would be compiled when it first comes up.
_PLACES = ["memory", "n_segments", "n_rows", "n1", "stride1", "n2", "stride2"]


@triton.jit(do_not_specialize=[*_PLACES, "pitch", "stream", "spans", "span"])
def move_rows(
    cells,  # *int64 [cells]: bytes from memory to each cell
    segments,  # *int64 [3, pitch], maybe of the host: place of the segment, place in the stream, bytes of each of its rows
    pitch,
    memory,  # int64: address, a multiple of UNIT
    stream,  # int64: address of place 0 in the packed stream, a multiple of UNIT
    n_segments,
    n_rows,
    n1,
    stride1,
    n2,
    stride2,
    spans,  # pieces that the longest row is cut into
    span,  # units in each piece
    UNIT: tl.constexpr,  # bytes that all addresses, strides and sizes are multiples of: 1, 2, 4, 8 or 16
    ROWS: tl.constexpr,  # rows moved at once
    WORDS: tl.constexpr,  # words of each moved at once
    PACK: tl.constexpr,  # from memory to the stream, else back
):
    """Move rows of all segments into the packed stream, or out of it."""
    # A word is what one lane moves; 16 bytes go as two words side by side, which the compiler joins.
    PER: tl.constexpr = 2 if UNIT == 16 else 1
    if UNIT >= 8:
        word = tl.int64
    elif UNIT == 4:
        word = tl.int32
    elif UNIT == 2:
        word = tl.int16
    else:
        word = tl.int8
    # An address below 2**31 comes as an int32, which the interpreter cannot turn into a pointer.
    here = tl.multiple_of(memory.to(tl.int64).to(tl.pointer_type(word)), UNIT)
    packed = tl.multiple_of(stream.to(tl.int64).to(tl.pointer_type(word)), UNIT)
    tiles = tl.cdiv(n_rows, ROWS)
    for job in range(tl.program_id(0), n_segments * tiles * spans, tl.num_programs(0)):
        tile, segment, first = job // spans % tiles, job // (spans * tiles), job % spans * span
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < n_rows
        place = tl.load(segments + segment)
        begin = tl.load(segments + pitch + segment)
        size = tl.load(segments + 2 * pitch + segment)
        at = _rows_at(cells, place, row, there, n1, stride1, n2, stride2) // UNIT * PER
        to = (begin + row.to(tl.int64) * size) // UNIT * PER
        last = tl.minimum(size // UNIT, first + span) * PER
        for w in range(first * PER, last, WORDS):
            step = w + tl.arange(0, WORDS)
            mask = there[:, None] & (step < last)[None, :]
            x, y = here + (at[:, None] + step[None, :]), packed + (to[:, None] + step[None, :])
            if PACK:
                tl.store(y, tl.load(x, mask=mask), mask=mask)
            else:
                tl.store(x, tl.load(y, mask=mask), mask=mask)


@triton.jit
def _shr(x, n: tl.constexpr):
    """Shift right by ``n`` bits, with zeros shifted in."""
    return (x.to(tl.uint64, bitcast=True) >> n).to(tl.int64, bitcast=True)


@triton.jit
def _low(x):
    """Return the lower half."""
    return x.to(tl.uint32).to(tl.int64)


@triton.jit
def _mix(x):
    """Apply splitmix64's finaliser, its factors written as signed numbers."""
    x = (x ^ _shr(x, 30)) * -4658895280553007687
    x = (x ^ _shr(x, 27)) * -7723592293110705685
    return x ^ _shr(x, 31)


@triton.jit(do_not_specialize=[*_PLACES, "key1", "key2", "nbytes", "salt"])
def digest_rows(
    cells,  # *int64 [cells]: bytes from memory to each cell
    cell_keys,  # *int64 [cells]
    segments,  # *int64 [2, segments]: place of the segment, key of its first token
    factors,  # *int64 [at least 2 * n_words]: keys of the lower and the upper half of each word
    memory,  # int64: address, a multiple of UNIT
    out,  # *int64 [1]: the sum of all values is added to it
    n_segments,
    n_rows,
    n1,
    stride1,
    key1,
    n2,
    stride2,
    key2,
    nbytes,  # of a row
    salt,  # what stands for the row's length
    ROWS: tl.constexpr,  # rows read at once
    WORDS: tl.constexpr,  # 8-byte words of each read at once
    UNIT: tl.constexpr,  # bytes that all addresses, strides and sizes are multiples of: 1, 8 or 16
):
    """Add ``kvxfer.memory.checksum`` of rows that are units to ``out``: axis 1 is heads, axis 2 tokens."""
    PER: tl.constexpr = 2 if UNIT == 16 else 1
    here = tl.multiple_of(memory.to(tl.int64).to(tl.pointer_type(tl.int64)), UNIT)
    bytes_here, total = memory.to(tl.int64).to(tl.pointer_type(tl.uint8)), tl.zeros((), tl.int64)
    tiles, n_words = tl.cdiv(n_rows, ROWS), tl.cdiv(nbytes, 8 * PER) * PER
    for job in range(tl.program_id(0), n_segments * tiles, tl.num_programs(0)):
        tile, segment = job % tiles, job // tiles
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < n_rows
        at = _rows_at(cells, tl.load(segments + segment), row, there, n1, stride1, n2, stride2)
        inner = row % (n1 * n2)
        key = tl.load(cell_keys + row // (n1 * n2), mask=there, other=0) + tl.load(segments + n_segments + segment)
        key += (inner // n2).to(tl.int64) * key1 + (inner % n2).to(tl.int64) * key2
        # Summed over the words of a row at the end only: lanes have to meet for that.
        products = tl.zeros((ROWS, WORDS), tl.int64)
        for w in range(0, n_words, WORDS):
            step = w + tl.arange(0, WORDS)
            mask = there[:, None] & (step < n_words)[None, :]
            if UNIT >= 8:
                x = tl.load(here + ((at // UNIT * PER)[:, None] + step[None, :]), mask=mask, other=0)
            else:
                x = tl.zeros((ROWS, WORDS), tl.int64)
                for b in tl.static_range(8):
                    byte = step * 8 + b
                    inside = there[:, None] & (byte < nbytes)[None, :]
                    piece = tl.load(bytes_here + (at[:, None] + byte[None, :]), mask=inside, other=0)
                    x |= piece.to(tl.int64) << (8 * b)
            low = tl.load(factors + 2 * step, mask=step < n_words, other=0)
            high = tl.load(factors + 2 * step + 1, mask=step < n_words, other=0)
            products += _low(x) * low[None, :] + _shr(x, 32) * high[None, :]
        digest = tl.sum(products, axis=1) + salt
        total += tl.sum(tl.where(there, _mix(digest ^ key), 0), axis=0)
    tl.atomic_add(out, total)
