"""Frames: messages on a control connection, each behind its length."""

from __future__ import annotations

import struct
from collections import deque

__all__ = ["FrameBuffer", "head_of"]

_HEAD = struct.Struct("<I")


def head_of(frame: bytes) -> bytes:
    """Return what precedes a frame."""
    return _HEAD.pack(len(frame))


class FrameBuffer:
    """What has come over a connection.

    Attributes:
        frames: The complete ones, in order; taken by ``pop`` only.
        rest: The beginning of the next frame, which is not complete.
    """

    def __init__(self) -> None:
        self.rest = bytearray()
        self.frames: deque[bytes] = deque()
        self._framed = 0  # bytes of them

    @property
    def nbytes(self) -> int:
        """How much is held."""
        return self._framed + len(self.rest)

    def pop(self) -> bytes:
        """Return the next frame."""
        frame = self.frames.popleft()
        self._framed -= len(frame)
        return frame

    def put_back(self, frame: bytes) -> None:
        """Return a frame to the front."""
        self.frames.appendleft(frame)
        self._framed += len(frame)

    def clear(self) -> None:
        """Drop everything."""
        self.rest.clear()
        self.frames.clear()
        self._framed = 0

    def split(self, limit: int) -> int:
        """Take the complete frames out of ``rest``.

        Returns:
            The length of a frame of more than ``limit`` bytes, after which nothing is taken; else 0.
        """
        at, end, length = 0, len(self.rest), 0
        with memoryview(self.rest) as view:
            while end - at >= _HEAD.size:
                (length,) = _HEAD.unpack_from(view, at)
                if length > limit or at + _HEAD.size + length > end:
                    break
                at += _HEAD.size
                self.frames.append(bytes(view[at : at + length]))
                self._framed += length
                at += length
        if at:
            del self.rest[:at]
        return length if length > limit else 0
