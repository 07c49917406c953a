"""The back end: links, batches and their completions."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.backend import Base, CopyPool, Memories
from kvxfer.backend.host import host, pid_namespace
from kvxfer.errors import PeerError, TransportError
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe, Verb
from kvxfer_cma import ptrace, vm
from kvxfer_cma.copy import Copy, CopyStep, DirectCopy
from kvxfer_cma.endpoint import LINK_BYTES, Endpoint, Exported
from kvxfer_cma.link import Link, way_in
from kvxfer_cma.options import Options
from kvxfer_cma.relay import Relay
from kvxfer_cma.ring import Relayed

__all__ = ["CmaTransport"]

BUDGET_S = 0.004
"""A poll starts no further step after this time."""

RETRY_S = 0.001
"""How soon to look again for what no descriptor tells: a fence that passes, a peer that opens its link."""

Keys = dict[int, NDArray[np.uint8]]


@dataclass
class _Job:
    """A batch on its way: ``copy`` begins once the fence ``after`` has passed."""

    link: Link
    copy: Copy
    after: Fence | None


class CmaTransport(Base[Endpoint, Link]):
    """Reads and writes CPU memory of another process of this host. ``Options`` says what can be set."""

    name = "cma"
    contract = 2
    guarded = "always"
    tells_hosts = True
    costs = {"cpu": 10}
    capabilities = Capabilities(
        verbs=frozenset({Verb.READ, Verb.WRITE}),
        elastic=True,
        run_bytes=1024,  # a piece costs the kernel about as much as copying these
        may_block_s=0.05,
    )
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        if reason := vm.unsupported():
            raise TransportError(f"the cma back end does not work here: {reason}")
        if self._options.allow_ptrace:
            ptrace.allow_any()
        self._host, self._pid_namespace = host(), pid_namespace()
        super().__init__(agent, options)
        # For each end of a link that was offered a key for each memory. They are there for the peer to look at:
        # `not_yet` until we connect, itself while the link is up, zeros when the link or the memory is given up.
        self._keys: dict[bytes, Keys] = {}
        self._jobs: dict[int, _Job] = {}
        self._pool = CopyPool(self._options.threads, "kvxfer-cma")
        self._relay = None if self._options.mode == "vm" else Relay(self.wakeup, self.memories)

    @classmethod
    def probe(cls) -> Probe:
        if reason := vm.unsupported():
            return Probe(False, reason)
        said, facts = ptrace.facts()
        return Probe(True, said, cls.capabilities.memory, facts)

    def drop_memory(self, memory: int) -> None:
        for keys in self._keys.values():
            if memory in keys:
                keys.pop(memory).fill(0)

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        link, keys, exported = os.urandom(LINK_BYTES), Keys(), []
        for number in sorted(memories):
            key = os.urandom(vm.KEY_BYTES)
            keys[number] = shown = np.frombuffer(bytearray(vm.not_yet(key)), np.uint8)
            pieces = tuple((r.address, r.nbytes) for r in self.memories.regions(number))
            exported.append(Exported(number, shown.ctypes.data, key, pieces))
        self._keys[link] = keys
        if self._relay is not None:
            self._relay.offer(link, memories, writable)
        socket = self._relay.name if self._relay is not None else ""
        return Endpoint(self.agent, self._host, self._pid_namespace, os.getpid(), link, socket, tuple(exported))

    def drop_endpoint(self, mine: Endpoint) -> None:
        """Nobody gets in by this end of a link any more."""
        self._retract(mine.link)

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        if theirs.host != self._host:
            raise TransportError(
                f"{theirs.agent} runs on another host; the cma back end works on one only, choose one that uses a network"
            )
        remote = Memories()
        by_number = {m.number: m.regions for m in theirs.memories}
        for memory in range(max(by_number, default=-1) + 1):
            remote.add(by_number.get(memory, ()))
        processes = way_in(theirs, self._options, self._pid_namespace)
        asker = self._relay.dial(theirs) if self._relay is not None and processes is None else None
        for key in self._keys[mine.link].values():
            key[:] = ~key
        if self._relay is not None:
            self._relay.open(mine.link)
        return Link(mine.link, theirs.agent, remote, processes or {}, asker)

    def drop_link(self, number: int, link: Link) -> None:
        self._retract(link.mine)
        if self._relay is not None and link.asker is not None:
            self._relay.hang_up(link.asker)
        for batch in [n for n, job in self._jobs.items() if job.link is link]:
            self._end(batch, PeerError(f"the link to {link.peer} was closed on this side"))

    def _retract(self, link: bytes) -> None:
        for key in self._keys.pop(link).values():
            key.fill(0)
        if self._relay is not None:
            self._relay.withdraw(link)

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        assert batch.remote_offsets is not None  # it is one-sided
        lengths, write = batch.lengths, batch.verb is Verb.WRITE
        local = self.memories.addresses(batch.local, batch.local_offsets, lengths)
        try:
            remote = link.remote.addresses(batch.remote, batch.remote_offsets, lengths)
        except TransportError as e:
            raise TransportError(f"at {link.peer}: {e}") from None
        copy: Copy
        if link.asker is not None:
            copy = Relayed(link.asker, write, local, batch.remote, batch.remote_offsets, lengths)
        elif batch.remote in link.processes:
            copy = DirectCopy(link.processes[batch.remote], self._pool, write, local, remote, lengths)
        else:
            raise TransportError(f"{link.peer} has no memory {batch.remote}")
        self._jobs[number] = _Job(link, copy, after)

    def stop(self, number: int, link: Link) -> None:
        self._end(number, TransportError(f"the batch with {link.peer} was aborted on this side"))

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        until = time.monotonic() + BUDGET_S
        while True:
            served = self._relay is not None and self._relay.handle(readable)
            more = self._steps(until) or served
            if not more or time.monotonic() >= until:
                break
            readable = self.wakeup.clear()
        if more:
            self.wakeup.set()

    def shut_down(self) -> None:
        for keys in self._keys.values():
            for key in keys.values():
                key.fill(0)
        if self._relay is not None:
            self._relay.close()
        self._pool.close()
        self._jobs.clear()

    def _steps(self, until: float) -> bool:
        """Give batches a step each, in turn, while there is time. True if any of them can go on at once."""
        more = later = False
        for number in list(self._jobs):
            if time.monotonic() >= until:
                return True
            job = self._jobs.pop(number)
            self._jobs[number] = job  # next time the others come first
            try:
                if job.after is not None and not job.after.passed():
                    step = CopyStep.LATER
                else:
                    job.after = None
                    step = job.copy.step()
            except Exception as e:  # whatever it is, it is how this batch ended
                self._end(number, e)
                continue
            if step is CopyStep.DONE:
                self._end(number, None)
            more |= step is CopyStep.MORE
            later |= step is CopyStep.LATER
        if later:
            self.wakeup.at(time.monotonic() + RETRY_S)
        return more

    def _end(self, number: int, error: Exception | None) -> None:
        self._jobs.pop(number).copy.drop()
        self.complete(Completion(number, error))
