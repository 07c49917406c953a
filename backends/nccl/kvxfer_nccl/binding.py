"""The seam between the back end and NCCL: all that the rest of the package knows of either.

``library.py`` fulfils it with nccl4py; tests have a fake for CPU memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvxfer.transport.contract import Fence
from kvxfer_nccl.options import Options

ID_BYTES = 128
"""Size of a unique id."""


class Mark(Protocol):
    """A place in a pipe's stream."""

    def passed(self) -> bool:
        """Whether all that was enqueued before it has run. Never blocks."""


@dataclass(frozen=True)
class PipeSpec:
    """What makes a pipe: who takes part (``sends``: this side), and where."""

    unique_id: bytes
    sends: bool
    device: str
    options: Options


class Pipe(Protocol):
    """A communicator of two ranks, the sender and the receiver, and the stream on which its operations run in order.

    There are no tags and no sizes on the way: the n-th run sent is the n-th received. ``open`` and ``abort`` block and
    are for threads of their own; the others return at once, are called by one thread, and only between the
    two.
    """

    def open(self) -> None:
        """Join the other side, and connect so far that no later operation has to wait for it on the host.

        Waits for the other side without an end.

        Raises:
            TransportError: , also when aborted meanwhile.
        """

    def move(self, runs: Sequence[tuple[int, int]]) -> None:
        """Enqueue the sending of runs (address, bytes), none of them empty, or their reception, in one launch.

        A caller that enqueues more than the device takes would be blocked until the other side has enqueued its half.

        Raises:
            TransportError: The communicator is broken.
        """

    def wait(self, fence: Fence) -> None:
        """Let what is enqueued later wait for a fence that has a device event."""

    def mark(self) -> Mark:
        """Mark the end of what is enqueued."""

    def error(self) -> str | None:
        """Return what the library reports to be wrong, in its words."""

    def abort(self) -> None:
        """End the communicator with all that is enqueued, and free what it has.

        From any thread, at any time (an ``open`` that is under way then ends as soon as it can), again and again. When
        it returns, nothing enqueued touches memory any more.

        Raises:
            TransportError: That cannot be had.
        """


class Binding(Protocol):
    """A library that makes pipes. ``versions``: for ``doctor``. ``release``: both sides must have the same."""

    @property
    def memory(self) -> frozenset[str]: ...

    @property
    def versions(self) -> Mapping[str, str]: ...

    @property
    def release(self) -> str: ...

    def default_device(self) -> str:
        """Of an agent that has registered no memory."""

    def identity(self, device: str) -> str:
        """Return a name of the device which no other device anywhere has."""

    def unique_id(self) -> bytes:
        """``ID_BYTES`` bytes for one new pair of pipes.

        Blocks, and costs a thread and a socket until both have opened: call it only when both are about to.
        """

    def pipe(self, spec: PipeSpec) -> Pipe:
        """Make a pipe, which does nothing yet."""
