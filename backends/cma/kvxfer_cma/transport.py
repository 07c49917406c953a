"""The back end: links, batches and their completions."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import PeerError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer.transport.crew import Crew
from kvxfer.transport.host import host, pid_namespace
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup
from kvxfer_cma import ptrace, vm
from kvxfer_cma.copy import Copy, Direct, Step
from kvxfer_cma.endpoint import LINK_BYTES, Endpoint, Exported
from kvxfer_cma.options import Options
from kvxfer_cma.relay import Relay
from kvxfer_cma.ring import Asker, Relayed

__all__ = ["CmaTransport"]

CAPABILITIES = Capabilities(
    verbs=frozenset({Verb.READ, Verb.WRITE}),
    same_host=True,
    run_bytes=1024,  # a piece costs the kernel about as much as copying these
    may_block_s=0.05,
)

BUDGET_S = 0.004
"""A poll starts no further step after this time."""

RETRY_S = 0.001
"""How soon to look again for what no descriptor tells: a fence that passes, a peer that opens its link."""

Keys = dict[int, NDArray[np.uint8]]


@dataclass(frozen=True)
class _Link:
    """Either ``processes`` (a way in for each of the peer's memories) or ``asker`` is set."""

    mine: bytes
    peer: str
    remote: Memories
    processes: Mapping[int, vm.Process]
    asker: Asker | None


@dataclass
class _Job:
    link: int
    memory: int
    copy: Copy
    after: Fence | None


class CmaTransport(Transport):
    """Reads and writes CPU memory of another process of this host. ``Options`` says what can be set."""

    name: ClassVar[str] = "cma"
    guarded = "always"
    contract: ClassVar[int] = 1

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self._options = Options.parse(options)
        if reason := vm.unsupported():
            raise TransportError(f"the cma back end does not work here: {reason}")
        if self._options.allow_ptrace:
            ptrace.allow_any()
        self._host, self._pid_namespace = host(), pid_namespace()
        self._memories = Memories()
        # For each end of a link that was offered a key for each memory. They are there for the peer to look at:
        # `not_yet` until we connect, itself while the link is up, zeros when the link or the memory is given up.
        self._keys: dict[bytes, Keys] = {}
        self._links: dict[int, _Link] = {}
        self._numbers = 0
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Completion] = []
        self._crew = Crew(self._options.threads, "kvxfer-cma")
        self._wakeup = Wakeup()
        self._relay = None if self._options.mode == "vm" else Relay(self._wakeup, self._memories)
        self._closed = False

    @classmethod
    def probe(cls) -> Probe:
        if reason := vm.unsupported():
            return Probe(False, reason)
        said, facts = ptrace.facts()
        return Probe(True, said, CAPABILITIES.memory, facts)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def register(self, regions: Sequence[Region]) -> int:
        self._check_open()
        return self._memories.add(regions, CAPABILITIES.memory)

    def deregister(self, memory: int) -> None:
        self._check_open()
        if any(job.memory == memory for job in self._jobs.values()):
            raise TransportError(f"memory {memory} is used by a batch in flight: abort it or wait for its end")
        self._memories.remove(memory)
        for keys in self._keys.values():
            if memory in keys:
                keys.pop(memory).fill(0)

    def endpoint(self) -> bytes:
        return self.endpoint_lending(self._memories, True)

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        self._check_open()
        link, keys, exported = os.urandom(LINK_BYTES), Keys(), []
        for number in sorted(memories):
            key = os.urandom(vm.KEY_BYTES)
            keys[number] = shown = np.frombuffer(bytearray(vm.not_yet(key)), np.uint8)
            pieces = tuple((r.address, r.nbytes) for r in self._memories.regions(number))
            exported.append(Exported(number, shown.ctypes.data, key, pieces))
        self._keys[link] = keys
        if self._relay is not None:
            self._relay.offer(link, memories, writable)
        return Endpoint(
            self.agent,
            self._host,
            self._pid_namespace,
            os.getpid(),
            link,
            self._relay.name if self._relay is not None else "",
            tuple(exported),
        ).encode()

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check_open()
        link, peer = Endpoint.decode(mine).link, Endpoint.decode(theirs)
        if link not in self._keys or self._connected(link):
            raise TransportError("connect: `mine` is no endpoint of this transport, or was used before")
        if peer.host != self._host:
            raise TransportError(
                f"{peer.agent} runs on another host; the cma back end works on one only, choose one that uses a network"
            )
        remote = Memories()
        by_number = {m.number: m.regions for m in peer.memories}
        for number in range(max(by_number, default=-1) + 1):
            remote.add(by_number.get(number, ()))
        processes = self._way_in(peer)
        asker = self._relay.dial(peer) if self._relay is not None and processes is None else None
        for key in self._keys[link].values():
            key[:] = ~key
        if self._relay is not None:
            self._relay.open(link)
        self._numbers += 1
        self._links[self._numbers] = _Link(link, peer.agent, remote, processes or {}, asker)
        return self._numbers

    def _way_in(self, peer: Endpoint) -> dict[int, vm.Process] | None:
        """The way into each of the peer's memories, or ``None`` if copies have to go through shared memory."""
        if self._options.mode == "shm":
            return None
        if peer.pid_namespace != self._pid_namespace:
            if self._options.mode == "auto":
                return None
            raise TransportError(
                f"{peer.agent} runs in another pid namespace (container): share one (`--pid=container:NAME`, "
                "Kubernetes `shareProcessNamespace`), or use `mode: shm`"
            )
        processes = {m.number: vm.Process(peer.pid, peer.agent, m.key_address, m.key) for m in peer.memories}
        try:
            for process in processes.values():
                process.ready()
        except vm.Refused as e:
            if self._options.mode == "auto":
                return None
            raise TransportError(str(e)) from e
        except PeerError:
            return processes  # gone already: its batches will say so
        return processes

    def withdraw(self, endpoint: bytes) -> None:
        self._check_open()
        link = Endpoint.decode(endpoint).link
        if link in self._keys and not self._connected(link):
            self._retract(link)

    def _connected(self, link: bytes) -> bool:
        return any(known.mine == link for known in self._links.values())

    def _retract(self, link: bytes) -> None:
        """Nobody gets in by this link any more."""
        for key in self._keys.pop(link).values():
            key.fill(0)
        if self._relay is not None:
            self._relay.withdraw(link)

    def disconnect(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        self._retract(link.mine)
        if self._relay is not None and link.asker is not None:
            self._relay.hang_up(link.asker)
        for number in [n for n, job in self._jobs.items() if job.link == peer]:
            self._end(number, PeerError(f"the link to {link.peer} was closed on this side"))
        self._wakeup.set()

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._check_open()
        link = self._links.get(batch.peer)
        if link is None:
            raise TransportError(f"there is no link {batch.peer}: it was closed, or never made")
        if batch.verb not in CAPABILITIES.verbs or not isinstance(batch, Batch) or batch.remote_offsets is None:
            raise TransportError(f"the cma back end reads and writes plain runs only, this is a {batch.verb}")
        lengths, write = batch.lengths, batch.verb is Verb.WRITE
        local = self._memories.addresses(batch.local, batch.local_offsets, lengths)
        try:
            remote = link.remote.addresses(batch.remote, batch.remote_offsets, lengths)
        except TransportError as e:
            raise TransportError(f"at {link.peer}: {e}") from None
        copy: Copy
        if link.asker is not None:
            copy = Relayed(link.asker, write, local, batch.remote, batch.remote_offsets, lengths)
        elif batch.remote in link.processes:
            copy = Direct(link.processes[batch.remote], self._crew, write, local, remote, lengths)
        else:
            raise TransportError(f"{link.peer} has no memory {batch.remote}")
        self._numbers += 1
        self._jobs[self._numbers] = _Job(batch.peer, batch.local, copy, after)
        self._wakeup.set()
        return self._numbers

    def poll(self) -> list[Completion]:
        self._check_open()
        until = time.monotonic() + BUDGET_S
        more = True
        while more and time.monotonic() < until:
            readable = self._wakeup.clear()
            served = self._relay is not None and self._relay.handle(readable)
            more = self._steps(until) or served
        if more:
            self._wakeup.set()
        ended, self._ended = self._ended, []
        return ended

    def abort(self, batch: int) -> None:
        if batch in self._jobs:
            peer = self._links[self._jobs[batch].link].peer
            self._end(batch, TransportError(f"the batch with {peer} was aborted on this side"))
            self._wakeup.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for keys in self._keys.values():
            for key in keys.values():
                key.fill(0)
        if self._relay is not None:
            self._relay.close()
        self._wakeup.close()
        self._crew.close()
        self._jobs.clear()
        self._links.clear()

    def fileno(self) -> int:
        self._check_open()
        return self._wakeup.fileno()

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
                    step = Step.LATER
                else:
                    job.after = None
                    step = job.copy.step()
            except Exception as e:  # whatever it is, it is how this batch ended
                self._end(number, e)
                continue
            if step is Step.DONE:
                self._end(number, None)
            more |= step is Step.MORE
            later |= step is Step.LATER
        if later:
            self._wakeup.at(time.monotonic() + RETRY_S)
        return more

    def _end(self, number: int, error: Exception | None) -> None:
        self._jobs.pop(number).copy.drop()
        self._ended.append(Completion(number, error))

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this transport is closed")
