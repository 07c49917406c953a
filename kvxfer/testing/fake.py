"""A back end within one process: really moves bytes, offers any subset of verbs, and breaks on request.

All fakes that share a ``Network`` can reach each other, from any threads. The network is the test's handle::

    net = Network()
    a = FakeTransport("a", {"network": net, "verbs": ["read"]})
    net.disturb("lose")      # the next batch never moves
    net.kill("a")            # agent a is gone, as a killed process is

Without the option ``network``, all fakes of the process share one. The fake is stricter than most back ends: it refuses
the wrong thread, a stream number that does not rise, and memory registered too late.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.geometry.plan import Ints
from kvxfer.settings import advice
from kvxfer.testing.network import ONE_SIDED, Fault, Network, Post, Side
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, PlanBatch, Probe, Transport, Verb
from kvxfer.transport.endpoint import EndpointBase
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup

__all__ = ["FakeTransport", "Network"]

FENCE_INTERVAL_S = 0.0005
"""How often a fence is asked whether it has passed."""

_shared_network = Network()

_DEFAULTS: dict[str, Any] = {
    "network": _shared_network,
    "verbs": [v.value for v in Verb],
    "memory": ["cpu"],
    "gathers": True,
    "factored": False,
    "run_bytes": 4096,
    "abort": "batch",
    "quiet": "batch",
    "delay_s": 0.0,
    "lose": 0.0,
    "corrupt": 0.0,
    "fail": 0.0,
    "seed": 0,
    "wakeup": True,
}


class Endpoint(EndpointBase, frozen=True):
    """``network``: the ``id`` of one; ``token``: names this end of a link."""

    backend = "fake"
    format = 1

    network: int
    token: str


class FakeTransport(Transport):
    """Options, all optional:

    ``network``: a ``Network``. ``verbs``: names (default: all). ``memory``: kinds. ``gathers``, ``factored``,
    ``run_bytes``, ``abort``, ``quiet``: as in ``Capabilities``. ``delay_s``: added to every batch. ``lose``, ``corrupt``,
    ``fail``: probability that a batch of this agent meets that fault, drawn from ``seed``. ``wakeup``: false takes
    ``fileno`` away.
    """

    name = "fake"
    contract = 1
    guarded = "always"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
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
            same_host=True,
            run_bytes=o["run_bytes"],
            gathers=o["gathers"],
            factored=o["factored"],
            abort=o["abort"],
            quiet=o["quiet"],
        )
        self.memories = Memories()
        self.sides: dict[int, Side] = {}
        self.dead = self.stopped = False
        self._net: Network = o["network"]
        self._random = random.Random(o["seed"])
        self._thread = threading.current_thread()
        self._tokens: set[str] = set()
        self._sealed = self._closed = False
        self._numbers = 0
        self._completions: list[Completion] = []
        self._wakeup = Wakeup()
        with self._net.lock:
            self._net.join(self)

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "always there, within one process, for tests", frozenset({"cpu"}))

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def register(self, regions: Sequence[Region]) -> int:
        self._check()
        if self._sealed:
            raise TransportError("memory must be registered before the first endpoint is made")
        with self._net.lock:
            return self.memories.add(regions, self._capabilities.memory)

    def deregister(self, memory: int) -> None:
        self._check()
        with self._net.lock:
            if any(memory == p.batch.local and not p.withdrawn for s in self.sides.values() for p in s.posts):
                raise TransportError(f"memory {memory} is in use by a batch in flight")
            self.memories.remove(memory)

    def endpoint(self) -> bytes:
        self._check()
        self._sealed = True
        token = uuid.uuid4().hex
        self._tokens.add(token)
        with self._net.lock:
            self._net.own(token, self)
        return Endpoint(self.agent, id(self._net), token).encode()

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check()
        own, their = Endpoint.decode(mine), Endpoint.decode(theirs)
        if own.token not in self._tokens:
            raise TransportError("the first argument of connect is not an unused endpoint of this transport")
        if their.network != id(self._net):
            raise TransportError(f"the endpoint of {their.agent!r} belongs to another network or process")
        if own.token == their.token:
            raise TransportError("both endpoints are the same; connect takes one of each side")
        self._tokens.remove(own.token)
        with self._net.lock:
            peer = self._number()
            self.sides[peer] = side = Side(self, frozenset((own.token, their.token)), their.agent)
            self._net.link(side)
            self.wake()
            return peer

    def withdraw(self, endpoint: bytes) -> None:
        self._check()
        token = Endpoint.decode(endpoint).token
        if token in self._tokens:
            self._tokens.remove(token)
            with self._net.lock:
                self._net.disown(token)

    def disconnect(self, peer: int) -> None:
        self._check()
        with self._net.lock:
            side = self.sides.pop(peer, None)
            if side is not None:
                self._net.unlink(side)

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        self._check()
        if batch.verb not in self._capabilities.verbs:
            raise TransportError(f"this fake does not offer {batch.verb}")
        with self._net.lock:
            side = self.sides.get(batch.peer)
            if side is None:
                raise TransportError(f"there is no link {batch.peer}")
            local, remote, lengths = self._runs(batch)
            addresses = self.memories.addresses(batch.local, local, lengths)
            if batch.verb in ONE_SIDED:
                if remote is None or len(remote) != len(lengths):
                    raise TransportError(f"{batch.verb} needs one remote offset a run")
            else:
                remote = None
                if batch.stream <= side.last_stream.get(batch.verb, -1):
                    raise TransportError(f"stream numbers must rise: {batch.verb} {batch.stream} on link {batch.peer}")
                side.last_stream[batch.verb] = batch.stream
            due = time.monotonic() + self._options["delay_s"] + self._net.delay_s
            post = Post(self._number(), batch, side, addresses, remote, lengths, after, due, self._fate(batch.verb))
            side.posts.append(post)
            if side.broken is not None:
                self._net.fail(post, side.broken)
            self.wake()
            if side.other is not None:
                side.other.owner.wake()
            return post.number

    def poll(self) -> list[Completion]:
        self._check()
        with self._net.lock:
            self._wakeup.clear()
            if self.dead or self.stopped:
                return []
            for side in list(self.sides.values()):
                self._net.advance(side)
            self._wakeup.at(self._next_look())
            done, self._completions = self._completions, []
            return done

    def abort(self, batch: int) -> None:
        self._check()
        with self._net.lock:
            for side in self.sides.values():
                for post in side.posts:
                    if post.number == batch and not post.withdrawn:
                        self._abort(post)
                        return

    def close(self) -> None:
        with self._net.lock:
            if self._closed:
                return
            if threading.current_thread() is not self._thread and self._thread.is_alive():
                raise TransportError(f"the transport of {self.agent!r} belongs to another thread, which is still alive")
            self._closed = True
            self._net.leave(self)
            if self._capabilities.quiet != "never":
                self._net.exorcise(self)
            self.sides.clear()
            self._wakeup.close()

    def fileno(self) -> int | None:
        return self._wakeup.fileno() if self._options["wakeup"] else None

    # For the network

    def finish(self, completion: Completion) -> None:
        self._completions.append(completion)
        self.wake()

    def wake(self) -> None:
        self._wakeup.set()

    def _abort(self, post: Post) -> None:
        side = post.side
        if self._capabilities.abort == "batch":
            self._net.withdraw(post, "aborted here")
            return
        self._net.cut(side, "aborted here")
        if side.other is not None:
            self._net.cut(side.other, f"{self.agent!r} aborted the link")

    def _runs(self, batch: Batch | PlanBatch) -> tuple[Ints, Ints | None, Ints]:
        """(local offsets, remote offsets, lengths), out of the plan if there is one."""
        if isinstance(batch, Batch):
            remote = None if batch.remote_offsets is None else np.asarray(batch.remote_offsets, np.int64)
            return batch.local_offsets, remote, np.asarray(batch.lengths, np.int64)
        if not self._capabilities.factored:
            raise TransportError("a plan was given to a back end that is not factored")
        runs = batch.plan.runs()
        outwards = batch.verb in (Verb.WRITE, Verb.SEND)
        return (runs.src, runs.dst, runs.length) if outwards else (runs.dst, runs.src, runs.length)

    def _next_look(self) -> float | None:
        """When the next delay ends or a fence has to be asked again."""
        now = time.monotonic()
        posts = [p for side in self.sides.values() for p in side.posts if not p.withdrawn]
        times = [p.due for p in posts if p.due > now]
        if any(p.fenced for p in posts):
            times.append(now + FENCE_INTERVAL_S)
        return min(times, default=None)

    def _fate(self, verb: Verb) -> Fault | None:
        faults: tuple[Fault, ...] = ("lose", "corrupt", "fail")
        for fault in faults:
            chance = self._options[fault]
            if verb is not Verb.RECV and chance and self._random.random() < chance:
                return fault
        return self._net.fate(self.agent, verb)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _check(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.agent!r} is closed")
        if threading.current_thread() is not self._thread:
            raise TransportError(f"the transport of {self.agent!r} belongs to the thread that made it")
