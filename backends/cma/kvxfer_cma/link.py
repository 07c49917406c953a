"""One link to another process of this host, and the way into that process's memories.

The kernel says which process it is (``Liveness.process``), and that process itself says over its socket where its memories lie: so
nobody can name the memory of another. First the side that wants to copy sends a *key* that it has just drawn; the other shows it in its
memory from then on, and answers with the places of its memories and of the key in each (``vm``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvxfer.backend import CopyPool, LinkBase, Liveness, LivenessLinks, Memories, Submitted
from kvxfer.block_table import Ints
from kvxfer.errors import KvxferError, PeerError, TransportError
from kvxfer.transport import Batch, Completion, Verb
from kvxfer_cma import exported, vm
from kvxfer_cma.copy import Copy, DirectCopy
from kvxfer_cma.ring import ANSWERED, ASK, LEND, Asker, Relayed, Server

_SHOW, _PLACES = b"K", b"P"


@dataclass
class Lent:
    """What the peer of one link may reach, and in each of these memories the key for it, which is zeros once that is over."""

    numbers: frozenset[int]  # the memories
    writable: bool
    keys: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def show(self, key: bytes, memories: Memories) -> list[exported.Exported]:
        """Show a key; return where the memories are that are lent and still there."""
        self.wipe()
        self.keys = {n: np.frombuffer(bytearray(key), np.uint8) for n in sorted(self.numbers) if n in memories}
        return [
            exported.Exported(n, shown.ctypes.data, tuple((r.address, r.nbytes) for r in memories.regions(n)))
            for n, shown in self.keys.items()
        ]

    def lends(self, memory: int, write: bool) -> bool:
        return memory in self.numbers and (self.writable or not write)

    def take_back(self, memory: int) -> None:
        """Lend a memory no more."""
        self.numbers -= {memory}
        if memory in self.keys:
            self.keys.pop(memory).fill(0)

    def wipe(self) -> None:
        for shown in self.keys.values():
            shown.fill(0)
        self.keys.clear()


@dataclass(eq=False)
class CmaBatch(Submitted):
    """A batch on a link; ``local``: the address of each of its runs."""

    link: Link
    batch: Batch
    local: Ints


class Link(LinkBase[CmaBatch]):
    """A link to a peer, of which ``liveness`` tells. ``lent``: what it may reach here; ``shares``: whether in copies made for it.

    ``copies`` gets the copies that begin. An ``asker`` has them made through shared memory; without one the kernel makes them, once the
    peer has told its memories (``remote``), by a way into each of them (``processes``).
    """

    def __init__(
        self,
        mine: bytes,
        liveness: Liveness,
        lines: LivenessLinks,
        lent: Lent,
        asker: Asker | None,
        shares: bool,
        copies: dict[CmaBatch, Copy],
        pool: CopyPool,
        done: Callable[[Completion], None],
    ) -> None:
        super().__init__(done)
        self.mine, self.liveness, self.asker = mine, liveness, asker
        self.server: Server | None = None
        self.remote: Memories | None = None
        self.processes: Mapping[int, vm.Process] = {}
        self._lines, self._lent, self._shares, self._copies, self._pool = lines, lent, shares, copies, pool
        self._key = os.urandom(vm.KEY_BYTES)
        if asker is None:
            with suppress(OSError):  # it is gone, as its socket will say
                liveness.tell(_SHOW + self._key)

    @property
    def peer(self) -> str:
        return self.liveness.peer

    def failed(self, job: CmaBatch, why: Exception) -> str:
        return f"{job.batch.verb} of {job.batch.nbytes} bytes with {self.peer} failed: {why}"

    def greet(self) -> bool:
        return self.asker is not None or self.remote is not None

    def post(self, job: CmaBatch) -> None:
        batch, write = job.batch, job.batch.verb is Verb.WRITE
        assert batch.remote_offsets is not None  # it is one-sided
        if self.asker is not None:
            self._copies[job] = Relayed(self.asker, write, job.local, batch.remote, batch.remote_offsets, batch.lengths)
            return
        assert self.remote is not None  # the link is up
        if batch.remote not in self.processes:
            raise TransportError(f"{self.peer} has no memory {batch.remote}")
        try:
            there = self.remote.addresses(batch.remote, batch.remote_offsets, batch.lengths)
        except TransportError as e:
            raise TransportError(f"at {self.peer}: {e}") from None
        process = self.processes[batch.remote]
        self._copies[job] = DirectCopy(process, self._pool, write, job.local, there, batch.lengths)

    def end(self, job: CmaBatch, cause: Exception | None = None, quiet: bool = True) -> None:
        copy = self._copies.pop(job, None)
        if copy is not None:
            copy.drop()
        super().end(job, cause, quiet)

    def bye(self, cause: KvxferError, says: str | None) -> None:
        self._lines.hang_up(self.liveness)
        for job in list(self.flights.values()):
            self.end(job, cause)

    def hear(self, memories: Memories) -> None:
        """Answer and take in what the peer has said, given the memories of this side.

        Raises:
            PeerError: It makes no sense.
            OSError: No descriptor is left for the answer.
        """
        heard = self.liveness.heard
        while heard:
            message, descriptors = heard.popleft()
            try:
                if message[:1] == _SHOW and len(message) == 1 + vm.KEY_BYTES and not descriptors:
                    self._answer(message[1:], memories)
                elif message == LEND and len(descriptors) == 1 and self._shares and self.server is None:
                    self.server = Server(descriptors[0], memories, self._lent.lends)
                elif message[:1] == ASK and self.server is not None:
                    with suppress(OSError):  # it is gone, as its socket will say
                        self.liveness.tell(ANSWERED + self.server.answer(message[1:]))
                elif message[:1] == ANSWERED and self.asker is not None:
                    self.asker.answered(message[1:])
                elif message == _PLACES and len(descriptors) == 1 and self.asker is None and self.remote is None:
                    self._take(exported.read_back(descriptors[0]))
                else:
                    raise PeerError("it sent a message that makes no sense")
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _answer(self, key: bytes, memories: Memories) -> None:
        file = exported.written(self._lent.show(key, memories))
        try:
            with suppress(OSError):  # it is gone, as its socket will say
                self.liveness.tell(_PLACES, file)
        finally:
            os.close(file)

    def _take(self, said: list[exported.Exported]) -> None:
        remote, by_number = Memories(), {m.number: m.regions for m in said}
        try:
            for memory in range(max(by_number, default=-1) + 1):
                remote.add(by_number.get(memory, ()))
        except TransportError as e:
            raise PeerError(f"its description of its memory makes no sense ({e})") from e
        owner = self.liveness.process
        self.processes = {m.number: vm.Process(owner, self.peer, m.key_address, self._key) for m in said}
        self.remote = remote
