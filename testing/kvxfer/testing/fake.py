"""A back end within one process: it really moves bytes, offers any subset of verbs, and breaks on request.

All fakes that share a ``Network`` can reach each other, from any threads. Tests control them through the network::

    net = Network()
    a = FakeTransport("a", {"network": net, "verbs": ["read"]})
    net.disturb("lose")      # the next batch never moves
    net.kill("a")            # agent a is gone, as a killed process is

Without the option ``network``, all fakes of the process share one.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from kvxfer import clock
from kvxfer.backend import Base, EndpointBase
from kvxfer.backend.base import ONE_SIDED
from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry.tensor import HOST
from kvxfer.settings import advice
from kvxfer.testing.network import LinkEnd, Network, PendingBatch
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, PlanBatch, Probe, Quieted, Verb

__all__ = ["FakeTransport", "Network"]

FENCE_INTERVAL_S = 0.0005
"""Seconds between two checks of whether a fence has passed."""

_shared_network = Network()

_DEFAULTS: dict[str, Any] = {
    "network": _shared_network,
    "verbs": [v.value for v in Verb],
    "memory": [HOST],
    "elastic": True,
    "gathers": True,
    "factored": False,
    "run_bytes": 4096,
    "abort": "batch",
    "quiet": "batch",
    "quiet_s": 0.05,
    "lends": True,
    "delay_s": 0.0,
    "corrupt": False,
    "wakeup": True,
}


class Endpoint(EndpointBase, frozen=True):
    """A fake's end of a future link: the ``id`` of its ``Network``, and a name for the end."""

    backend = "fake"
    format = 1

    network: int
    token: str


class FakeTransport(Base[Endpoint, LinkEnd]):
    """A back end within one process, which moves bytes and breaks on request.

    All options may be left out. ``verbs`` are names (default: all) and ``memory`` kinds of memory. ``elastic``,
    ``gathers``, ``factored``, ``run_bytes``, ``abort``, ``quiet`` and ``lends`` are as in ``Capabilities``. ``network`` is a ``Network``.
    ``quiet_s`` is how many seconds a failed batch takes to get quiet if ``quiet`` is ``later``. ``delay_s`` delays every batch.
    With ``corrupt``, each batch of this agent meets that fault; ``kvxfer.testing.faults`` has faults by chance.
    With ``wakeup: false``, ``fileno`` returns ``None``.
    """

    name = "fake"
    contract = 2
    guarded = "always"
    tells_hosts = True
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        for key in options:
            if key not in _DEFAULTS:
                raise ConfigError(f"unknown option {key!r} of back end 'fake': {advice(key, _DEFAULTS)}")
        self._options = o = {**_DEFAULTS, **options}
        try:
            verbs = frozenset(Verb(v) for v in o["verbs"])
        except ValueError as e:
            raise ConfigError(f"option 'verbs' of back end 'fake': {e}") from None
        if len(verbs & {Verb.SEND, Verb.RECV}) == 1:
            raise ConfigError("option 'verbs' of back end 'fake': send and recv come together")
        self._capabilities = Capabilities(
            verbs=verbs,
            memory=frozenset(o["memory"]),
            elastic=o["elastic"],
            run_bytes=o["run_bytes"],
            gathers=o["gathers"],
            factored=o["factored"],
            may_block_s=0.1,  # a batch moves in one call, however large
            abort=o["abort"],
            quiet=o["quiet"],
            lends=o["lends"],
        )
        super().__init__(agent, options)
        self.dead = self.stopped = False
        self._net: Network = o["network"]
        self._lent: dict[str, tuple[frozenset[int], bool]] = {}
        with self._net.lock:
            self._net.join(self)

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "always there, within one process, for tests", frozenset({HOST}))

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        token = uuid.uuid4().hex
        self._lent[token] = (frozenset(memories), writable)
        with self._net.lock:
            self._net.own(token, self)
        return Endpoint(self.agent, id(self._net), token)

    def drop_endpoint(self, mine: Endpoint) -> None:
        self._lent.pop(mine.token, None)
        with self._net.lock:
            self._net.disown(mine.token)

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> LinkEnd:
        if theirs.network != id(self._net):
            raise TransportError(f"the endpoint of {theirs.agent!r} belongs to another network or process")
        lent, writable = self._lent.pop(mine.token)
        side = LinkEnd(self, frozenset((mine.token, theirs.token)), theirs.agent, lent, writable)
        self._net.link(side)
        return side

    def drop_link(self, number: int, link: LinkEnd) -> None:
        self._net.unlink(link)

    def start(self, number: int, link: LinkEnd, batch: Batch, after: Fence | None) -> None:
        lengths, remote = np.asarray(batch.lengths, np.int64), None
        if batch.verb in ONE_SIDED:
            if batch.remote_offsets is None or len(batch.remote_offsets) != len(lengths):
                raise TransportError(f"a {batch.verb.upper()} needs a remote offset for each run")
            remote = np.asarray(batch.remote_offsets, np.int64)
        addresses = self.memories.addresses(batch.local, batch.local_offsets, lengths)
        with self._net.lock:
            due = clock.now() + self._options["delay_s"] + self._net.delay_s
            fate = "corrupt" if self._options["corrupt"] and batch.verb is not Verb.RECV else self._net.fate(batch.verb)
            post = PendingBatch(number, batch, link, addresses, remote, lengths, after, due, fate)
            link.posts.append(post)
            if link.broken is not None:
                self._net.fail(post, str(link.broken))
            if link.other is not None:
                link.other.owner.wake()

    def start_plan(self, number: int, link: LinkEnd, batch: PlanBatch, after: Fence | None) -> None:
        runs = batch.plan.runs()
        outwards = batch.verb in (Verb.WRITE, Verb.SEND)
        here, there = (runs.src, runs.dst) if outwards else (runs.dst, runs.src)
        moved = Batch(batch.verb, batch.peer, batch.local, runs.length, here, batch.remote, there, batch.stream)
        self.start(number, link, moved, after)

    def stop(self, number: int, link: LinkEnd) -> None:
        with self._net.lock:
            for post in [p for p in link.posts if p.number == number and not p.withdrawn]:
                self._abort(post)

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        looked = clock.now()
        for side in list(self.links.values()):
            self._net.advance(side)
        for number in self._net.settled(self):
            self.quieted(number)
        self.wakeup.at(self._next_look(looked))

    def shut_down(self) -> None:
        self._net.leave(self)

    # Peers in other threads read and change these tables, so they are changed only under the network's lock.

    def deregister(self, memory: int) -> None:
        with self._net.lock:
            super().deregister(memory)

    def connect(self, mine: bytes, theirs: bytes) -> int:
        with self._net.lock:
            return super().connect(mine, theirs)

    def disconnect(self, peer: int) -> None:
        with self._net.lock:
            super().disconnect(peer)

    def poll(self) -> list[Completion | Quieted]:
        with self._net.lock:
            if not (self.dead or self.stopped):
                return super().poll()
            self.check()
            self.wakeup.clear()
            return []

    def close(self) -> None:
        with self._net.lock:
            super().close()

    def fileno(self) -> int | None:
        return super().fileno() if self._options["wakeup"] else None

    # For the network

    @property
    def quiet_s(self) -> float:
        """How long a failed batch takes to get quiet."""
        return float(self._options["quiet_s"])

    def finish(self, completion: Completion) -> None:
        """Report a completion at the next ``poll``. Called by the network, which holds the lock."""
        self.complete(completion)
        self.wake()

    def wake(self) -> None:
        """Wake the owner's thread. Called by the network, which holds the lock."""
        self.wakeup.set()

    def _abort(self, post: PendingBatch) -> None:
        side = post.side
        if self._capabilities.abort == "batch":
            self._net.withdraw(post, "aborted here")
            return
        self._net.cut(side, "aborted here")
        if side.other is not None:
            self._net.cut(side.other, f"{self.agent!r} aborted the link")

    def _next_look(self, looked: float) -> float | None:
        """Return when to look again, by ``kvxfer.clock``: at the end of a delay, or when a fence is to be checked.

        A batch that was not ready at ``looked`` may have become so since, without having been moved.
        """
        posts = [p for side in self.links.values() for p in side.posts if not p.withdrawn]
        times = [p.due for p in posts if p.due > looked] + self._net.settling(self)
        times += [looked + FENCE_INTERVAL_S if p.fenced() else looked for p in posts if p.after is not None]
        return min(times, default=None)
