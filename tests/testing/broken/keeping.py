"""Back ends that keep, take or use what they must not: memory, links, processors, files."""

from __future__ import annotations

import dataclasses
import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from kvxfer.errors import TransportError
from kvxfer.geometry.region import Region
from kvxfer.testing import FakeTransport
from kvxfer.testing.fake import Endpoint
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe
from tests.testing.broken.ending import LeavesItsWritesBehind


class Spins(FakeTransport):
    """Its descriptor is always readable."""

    def poll(self) -> list[Completion]:
        done = super().poll()
        self.wake()
        return done


class LeaksMemory(FakeTransport):
    kept: ClassVar[list[bytes]] = []

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.kept.append(b"x" * (1 << 20))
        return super().connect(mine, theirs)


class LeaksDescriptors(FakeTransport):
    def close(self) -> None:
        if not self.closed:
            os.dup(0)
        super().close()


class KeepsEndpoints(FakeTransport):
    def withdraw(self, endpoint: bytes) -> None:
        self.__dict__.setdefault("kept", []).append(Endpoint.decode(endpoint))
        super().withdraw(endpoint)


class KeepsWhatHasEnded(FakeTransport):
    """Forgets a closed link when its end is told of, which was before where the peer had closed it."""

    def drop_link(self, number: int, link: LinkEnd) -> None:
        if link.broken is not None:
            self.__dict__.setdefault("ending", {})[number] = link
        super().drop_link(number, link)


class KeepsWhatWasNeverMade(FakeTransport):
    """Waits for the peer before it forgets a closed link."""

    def drop_link(self, number: int, link: LinkEnd) -> None:
        if link.other is None:
            self.__dict__.setdefault("waiting", []).append(link)
        super().drop_link(number, link)


class KeepsWhatWasAborted(FakeTransport):
    def complete(self, completion: Completion) -> None:
        if completion.error is not None:
            self.__dict__.setdefault("failed", {})[completion.batch] = completion
        super().complete(completion)


class TakesAnyOption(FakeTransport):
    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, {k: v for k, v in options.items() if k != "no_such_option"})


class TakesUsedMemoryBack(FakeTransport):
    def deregister(self, memory: int) -> None:
        self.memories.remove(memory)


class HasEightLinks(FakeTransport):
    def connect(self, mine: bytes, theirs: bytes) -> int:
        peer = super().connect(mine, theirs)
        if len(self.links) > 8:
            self._net.cut(self.links[peer], f"{self.links[peer].peer_agent!r}: too many links")
        return peer


class TakesAnyMemory(FakeTransport):
    """Registers memory of kinds that it cannot move."""

    def register(self, regions: Sequence[Region]) -> int:
        return super().register([msgspec.structs.replace(r, device="cpu") for r in regions])


class LeaksWithEachBatch(FakeTransport):
    kept: ClassVar[list[bytes]] = []

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self.kept.append(bytes(512))
        return super().submit(batch, after)


class LeaksMappedMemory(FakeTransport):
    """With each batch 64 KiB that no allocator knows of."""

    mapped: ClassVar[list[mmap.mmap]] = []

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self.mapped.append(mmap.mmap(-1, 64 << 10))
        self.mapped[-1][:] = bytes(64 << 10)
        return super().submit(batch, after)


class LeaksOnAbort(FakeTransport):
    kept: ClassVar[list[bytes]] = []

    def abort(self, batch: int) -> None:
        self.kept.append(bytes(4096))
        super().abort(batch)


class LeavesAFile(FakeTransport):
    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        descriptor, path = tempfile.mkstemp(prefix="kvxfer-mutant-", dir="/dev/shm")
        os.close(descriptor)
        LEFT.append(path)


class LeavesAChild(FakeTransport):
    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        CHILDREN.append(subprocess.Popen(["sleep", "60"]))


class SpinsAtFences(FakeTransport):
    def _next_look(self, looked: float) -> float | None:
        fenced = any(p.after is not None for side in self.links.values() for p in side.posts)
        return looked if fenced else super()._next_look(looked)


class ServesWhatWasGivenBack(FakeTransport):
    """Refuses batches of its own on memory that was given back, and serves those of its peers."""

    def deregister(self, memory: int) -> None:
        self.__dict__.setdefault("gone", set()).add(memory)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        if batch.local in self.__dict__.get("gone", ()):
            raise TransportError("given back")
        return super().submit(batch, after)


class ClaimsAGpu(FakeTransport):
    """Takes memory of GPUs, and says that its bytes have moved."""

    @classmethod
    def probe(cls) -> Probe:
        return dataclasses.replace(super().probe(), memory=frozenset({"cpu", "cuda"}))

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, memory=frozenset({"cpu", "cuda"}))

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        if any(r.device != "cpu" for r in self.memories.regions(batch.local)):
            batch = dataclasses.replace(batch, lengths=0 * batch.lengths)
        return super().submit(batch, after)


class SealsItsMemory(FakeTransport):
    """Takes no memory any more once it has made an endpoint."""

    def register(self, regions: Sequence[Region]) -> int:
        if self.unused or self.links:
            raise TransportError("too late")
        return super().register(regions)


class TakesWhoComesFirst(FakeTransport):
    """Whose connection comes in is told by its being the first."""

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> LinkEnd:
        side = super().make_link(number, mine, theirs)
        waiting = [o for m in self._net._members if m.agent == theirs.agent for o in m.links.values() if not o.other]
        if side.other is None and waiting:
            side.other, waiting[0].other = waiting[0], side
        return side


LEFT: list[str] = []
"""Files that mutants have left behind."""
CHILDREN: list[subprocess.Popen[bytes]] = []
"""Processes that mutants have left behind."""


def clean_up() -> None:
    """Take away what mutants keep and leave."""
    LeaksMemory.kept.clear()
    LeaksWithEachBatch.kept.clear()
    LeaksOnAbort.kept.clear()
    while LeaksMappedMemory.mapped:
        LeaksMappedMemory.mapped.pop().close()
    LeavesItsWritesBehind.behind.clear()
    while LEFT:
        os.unlink(LEFT.pop())
    while CHILDREN:
        child = CHILDREN.pop()
        child.kill()
        child.wait()
