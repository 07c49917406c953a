"""Frames: messages on a control connection, each behind its length."""

from __future__ import annotations

import struct
from collections import deque

HEAD = struct.Struct("<I")
"""What precedes a frame: its length."""

_OBJECT = 48
"""The bytes that a frame takes beside its own: however short it is, it is an object."""


class FrameBuffer:
    """What has come over a connection.

    Attributes:
        frames: The complete ones, in order, to be taken; ``split`` adds more.
        rest: The beginning of the next frame, which is not complete.
    """

    def __init__(self) -> None:
        self.rest = bytearray()
        self.frames: deque[bytes] = deque()
        self._framed = 0  # bytes of them, and of those that were taken since there was none

    @property
    def nbytes(self) -> int:
        """How much is held, at the most."""
        return self._framed + len(self.rest)

    def put_back(self, frame: bytes) -> None:
        """Return a frame to the front."""
        self.frames.appendleft(frame)
        self._framed += len(frame) + _OBJECT

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
        if not self.frames:
            self._framed = 0
        at, end, length = 0, len(self.rest), 0
        with memoryview(self.rest) as view:
            while end - at >= HEAD.size:
                (length,) = HEAD.unpack_from(view, at)
                if length > limit or at + HEAD.size + length > end:
                    break
                at += HEAD.size
                self.frames.append(bytes(view[at : at + length]))
                self._framed += length + _OBJECT
                at += length
        if at:
            del self.rest[:at]
        return length if length > limit else 0
