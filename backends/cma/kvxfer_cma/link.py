"""One link to another process of this host, and the way into that process's memories.

The kernel says which process it is (``Liveness.process``), and that process itself says over its socket where its memories lie: so
nobody can name the memory of another. First the side that wants to copy sends a *key* that it has just drawn; the other shows it in its
memory from then on, and answers with the places of its memories and of the key in each (``vm``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvxfer.backend import Liveness, Memories
from kvxfer.errors import PeerError, TransportError
from kvxfer_cma import exported, vm
from kvxfer_cma.ring import ANSWERED, ASK, LEND, Asker, Server

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
class Link:
    """A link to a peer."""

    mine: bytes  # its name on this side
    liveness: Liveness  # the peer's process, and what it says
    lent: Lent  # what it may reach here
    asker: Asker | None  # has copies made through shared memory; ``None`` if the kernel copies
    shares: bool  # whether copies are made so for the peer
    server: Server | None = None  # makes them, once the peer has sent its slots
    remote: Memories | None = None  # the peer's memories, at their addresses there, once it has told them
    processes: Mapping[int, vm.Process] = field(default_factory=dict)  # a way into each of them
    _key: bytes = field(default_factory=lambda: os.urandom(vm.KEY_BYTES))

    @property
    def peer(self) -> str:
        return self.liveness.peer

    @property
    def broken(self) -> PeerError | None:
        """Why no batch can move any more."""
        return None if self.liveness.down is None else PeerError(self.liveness.down)

    def ask(self) -> None:
        """Ask the peer where its memories are."""
        with suppress(OSError):  # it is gone, as its socket will say
            self.liveness.tell(_SHOW + self._key)

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
                elif message == LEND and len(descriptors) == 1 and self.shares and self.server is None:
                    self.server = Server(descriptors[0], memories, self.lent.lends)
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
        file = exported.written(self.lent.show(key, memories))
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
