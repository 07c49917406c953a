"""The runs of a batch as one stream of bytes, cut into frames to send, filled from frames received.

Long runs are never copied here: their frames are views of the memory itself. Short runs are gathered, and all runs are
scattered, with numpy: a window of items of the runs' length that begins at every byte turns any set of
equally long runs, at whatever offsets, into one indexing operation.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRAME = 1 << 20
"""Longest frame in bytes. Longer ones leave the caches between ZeroMQ and us, shorter ones cost more system calls."""

LONG = 256 << 10
"""From this length on a run goes out without a copy: a frame of its own costs about as much as copying this."""

MIN_LENGTHS = 16
"""With more different lengths in a frame, or fewer runs of each, copying one run at a time is faster."""

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

# Neither copies nor owns; unlike an array type of ctypes it makes no new class for each length.
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


def view(address: int, nbytes: int) -> memoryview:
    """Memory at an address. It is the caller's business that it exists."""
    return memoryview(_memory_view(address, nbytes, _WRITABLE))


class ByteStream:
    """``addresses`` and ``lengths``: int64, one of each a run."""

    def __init__(self, addresses: Ints, lengths: Ints) -> None:
        keep = lengths > 0
        self._at, self._lengths = addresses[keep], lengths[keep]
        self._ends = np.cumsum(self._lengths)
        self._starts = self._ends - self._lengths
        self._long_starts = self._starts[self._lengths >= LONG]
        self._windows: dict[int, tuple[int, NDArray[Any]]] = {}
        self.nbytes = int(self._ends[-1]) if len(self._ends) else 0

    def frame_end(self, offset: int) -> int:
        """Where the frame that begins at ``offset`` (0, or the end of another frame) ends."""
        if len(self._ends) == 1 and self.nbytes < LONG:
            return self.nbytes
        i = int(np.searchsorted(self._ends, offset, side="right"))
        start, length = int(self._starts[i]), int(self._lengths[i])
        if length >= LONG:
            # Even pieces, so that no small rest remains.
            size = -(-length // -(-length // FRAME))
            return min(start + ((offset - start) // size + 1) * size, start + length)
        j = int(np.searchsorted(self._ends, offset + FRAME, side="right"))
        end = int(self._ends[j - 1])
        k = int(np.searchsorted(self._long_starts, offset))
        return min(end, int(self._long_starts[k])) if k < len(self._long_starts) else end

    def read(self, offset: int, end: int) -> memoryview:
        """Return the bytes of a frame: a view of the memory itself where they lie in one run, else gathered."""
        i = int(np.searchsorted(self._ends, offset, side="right"))
        if end <= int(self._ends[i]):
            return view(int(self._at[i]) + offset - int(self._starts[i]), end - offset)
        j = int(np.searchsorted(self._ends, end, side="left")) + 1
        lengths = self._lengths[i:j]
        length = int(lengths[0])
        if len(lengths) >= MIN_LENGTHS and offset == int(self._starts[i]) and (lengths == length).all():
            base, window = self._window(length)
            return window[self._at[i:j] - base].view(np.uint8).data
        frame = np.empty(end - offset, np.uint8)
        self._copy(offset, frame, inward=False)
        return frame.data

    def write(self, offset: int, data: memoryview) -> None:
        """Put received bytes where they belong. ``offset + len(data)`` must not be beyond ``nbytes``."""
        self._copy(offset, np.frombuffer(data, np.uint8), inward=True)

    def _copy(self, offset: int, data: Bytes, inward: bool) -> None:
        end = offset + len(data)
        if len(self._ends) == 1:
            self._part(0, offset, end, data, inward)
            return
        i = int(np.searchsorted(self._ends, offset, side="right"))
        j = int(np.searchsorted(self._ends, end, side="left")) + 1
        if offset > int(self._starts[i]) or end < int(self._ends[i]):
            i = self._part(i, offset, end, data, inward)
        if i < j and end < int(self._ends[j - 1]):
            self._part(j - 1, offset, end, data, inward)
            j -= 1
        if i >= j:
            return
        lengths = self._lengths[i:j]
        kinds = np.unique(lengths) if len(lengths) >= MIN_LENGTHS else lengths
        if len(lengths) < MIN_LENGTHS * len(kinds):
            for run in range(i, j):
                self._part(run, offset, end, data, inward)
            return
        for length in kinds.tolist():
            base, window = self._window(length)
            if len(kinds) == 1:
                at, where = self._at[i:j] - base, self._starts[i:j]
                lo = int(where[0]) - offset
                packed = data[lo : lo + length * (j - i)].view(f"V{length}")
                if inward:
                    window[at] = packed
                else:
                    packed[:] = window[at]
                continue
            pick = np.flatnonzero(lengths == length) + i
            at, where = self._at[pick] - base, self._starts[pick] - offset
            within = np.ndarray((len(data) - length + 1,), f"V{length}", data, strides=(1,))
            if inward:
                window[at] = within[where]
            else:
                within[where] = window[at]

    def _part(self, run: int, offset: int, end: int, data: Bytes, inward: bool) -> int:
        """Copy what of one run is between ``offset`` and ``end``; returns the next run."""
        start = int(self._starts[run])
        lo, hi = max(start, offset), min(int(self._ends[run]), end)
        memory, part = view(int(self._at[run]) + lo - start, hi - lo), data.data[lo - offset : hi - offset]
        if inward:
            memory[:] = part
        else:
            part[:] = memory
        return run + 1

    def _window(self, length: int) -> tuple[int, NDArray[Any]]:
        """Return the lowest address of the batch and an array whose item i is the ``length`` bytes from byte i on."""
        if length not in self._windows:
            low = int(self._at.min())
            span = int((self._at + self._lengths).max()) - low
            window = np.ndarray((span - length + 1,), f"V{length}", view(low, span), strides=(1,))
            self._windows[length] = low, window
        return self._windows[length]
