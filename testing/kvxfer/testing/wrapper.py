"""A back end around another one, which does what that does; subclasses change it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvxfer.backend.memories import Memories
from kvxfer.failures import Failure
from kvxfer.geometry.region import Region
from kvxfer.memory.registry import installed
from kvxfer.transport import registry
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, PlanBatch, Probe, Quieted, Transport


class Wrapper(Transport):
    """A back end that passes everything on to the back end ``inner``, which has a name or is ``module:Class``."""

    contract = 2
    guarded = "always"

    def __init__(self, agent: str, inner: str, inner_options: Mapping[str, Any]) -> None:
        super().__init__(agent, inner_options)
        self.inner = registry.load(inner)(agent, inner_options)
        self.memories = Memories()

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "as usable as the back end inside it; for tests", frozenset(installed()))

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def register(self, regions: Sequence[Region]) -> int:
        memory = self.inner.register(regions)
        self.memories.add(regions, frozenset(r.kind for r in regions))
        return memory

    def deregister(self, memory: int) -> None:
        self.inner.deregister(memory)
        self.memories.remove(memory)

    def endpoint(self) -> bytes:
        return self.inner.endpoint()

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        return self.inner.endpoint_lending(memories, writable)

    def dials(self, theirs: bytes) -> Collection[str]:
        return self.inner.dials(theirs)

    def connect(self, mine: bytes, theirs: bytes) -> int:
        return self.inner.connect(mine, theirs)

    def withdraw(self, endpoint: bytes) -> None:
        self.inner.withdraw(endpoint)

    def disconnect(self, peer: int) -> None:
        self.inner.disconnect(peer)

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        return self.inner.submit(batch, after)

    def poll(self) -> Sequence[Completion | Quieted]:
        return self.inner.poll()

    def bytes_moved(self, batch: int) -> int:
        return self.inner.bytes_moved(batch)

    def lost(self, peer: int) -> Failure | None:
        return self.inner.lost(peer)

    def abort(self, batch: int) -> None:
        self.inner.abort(batch)

    def close(self) -> None:
        self.inner.close()

    def fileno(self) -> int | None:
        return self.inner.fileno()

    @property
    def poll_interval_s(self) -> tuple[float, float]:
        return self.inner.poll_interval_s
