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

import ctypes
import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from kvxfer.errors import ConfigError, PeerError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.geometry.plan import Ints
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup

__all__ = ["FakeTransport", "Network"]

Fault = Literal["lose", "corrupt", "fail"]

FENCE_INTERVAL_S = 0.0005
"""How often a fence is asked whether it has passed."""


class Network:
    """What connects fakes, and the handle by which a test disturbs them. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.moved_bytes = 0
        self._lock = threading.RLock()
        self._links: dict[frozenset[str], list[_Side]] = {}
        self._members: list[FakeTransport] = []
        self._faults: list[tuple[Fault, str | None, Verb | None]] = []
        self._ghosts: list[_Ghost] = []

    def disturb(self, fault: Fault, count: int = 1, agent: str | None = None, verb: Verb | None = None) -> None:
        """The next ``count`` batches (of that agent and verb) that move bytes are lost (neither half ever completes by
        itself), corrupted (one byte is flipped where it arrives) or fail. Not for RECV: it is the SEND that moves."""
        with self._lock:
            self._faults += [(fault, agent, verb)] * count

    def kill(self, agent: str) -> None:
        """End all fakes of that name as a killed process would: silent themselves, noticed by their peers."""
        with self._lock:
            for t in [t for t in self._members if t.agent == agent]:
                t._dead = True
                self._leave(t)

    def stop(self, agent: str) -> None:
        """Nothing moves to or from this agent any more and nobody is told, as under SIGSTOP."""
        self._set_stopped(agent, True)

    def resume(self, agent: str) -> None:
        self._set_stopped(agent, False)

    def release_late(self) -> int:
        """Move now the bytes of all batches that failed without being quiet and have not become quiet since, as a
        network card that was not reset might. Returns how many there were."""
        with self._lock:
            ghosts, self._ghosts = self._ghosts, []
            for ghost in ghosts:
                ghost.move()
            return len(ghosts)

    def _set_stopped(self, agent: str, stopped: bool) -> None:
        with self._lock:
            for t in self._members:
                if t.agent == agent:
                    t._stopped = stopped
            for t in self._members:
                t._wakeup.set()

    def _leave(self, member: FakeTransport) -> None:
        self._members.remove(member)
        for side in member._sides.values():
            if side.other is not None:
                side.other.fail(f"{side.owner.agent!r} is gone (its process ended or it closed)")
            self._links.pop(side.key, None)

    def _fate(self, agent: str, batch: Batch) -> Fault | None:
        for i, (fault, only_agent, only_verb) in enumerate(self._faults):
            if only_agent in (None, agent) and only_verb in (None, batch.verb):
                del self._faults[i]
                return fault
        return None


_default_network = Network()


@dataclass
class _Post:
    """A submitted batch that has not ended."""

    number: int
    batch: Batch
    side: _Side
    addresses: Ints
    remote_addresses: Ints | None
    lengths: Ints
    after: Fence | None
    due: float
    fate: Fault | None
    aborted: bool = False

    def ready(self, now: float) -> bool:
        return now >= self.due and (self.after is None or self.after.passed())


@dataclass
class _Ghost:
    """Bytes that may still move for a batch that has failed already."""

    side: _Side
    move: Callable[[], None]


@dataclass
class _Side:
    """One end of a link. ``broken`` says why nothing can pass any more."""

    owner: FakeTransport
    peer: int
    key: frozenset[str]
    peer_agent: str
    other: _Side | None = None
    broken: str | None = None
    posts: list[_Post] = field(default_factory=list)
    last_stream: dict[Verb, int] = field(default_factory=dict)

    def of(self, verb: Verb) -> list[_Post]:
        return [p for p in self.posts if p.batch.verb is verb]

    def fail(self, why: str) -> None:
        """Nothing passes from now on; whatever was in flight ends."""
        self.broken = self.broken or why
        for p in list(self.posts):
            self.owner._fail(p, why)


class FakeTransport(Transport):
    """The fake. Options, all optional:

    ``network``: a ``Network``; ``verbs``: list of names (default: all); ``memory``: list of kinds; ``gathers``, ``factored``,
    ``run_bytes``, ``abort``, ``quiet``: as in ``Capabilities``; ``delay_s``: added to every batch; ``lose``, ``corrupt``,
    ``fail``: probability that a batch of this agent meets that fault, drawn from ``seed``; ``wakeup``: false takes
    ``fileno`` away.
    """

    name = "fake"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        known: dict[str, Any] = {
            "network": _default_network, "verbs": [v.value for v in Verb], "memory": ["cpu"], "gathers": True,
            "factored": False, "run_bytes": 4096, "abort": "batch", "quiet": "batch", "delay_s": 0.0, "lose": 0.0,
            "corrupt": 0.0, "fail": 0.0, "seed": 0, "wakeup": True,
        }  # fmt: skip
        for key in options:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
                raise ConfigError(f"unknown option {key!r} of back end 'fake': {hint}")
        o = {**known, **options}
        try:
            verbs = frozenset(Verb(v) for v in o["verbs"])
        except ValueError as e:
            raise ConfigError(f"option 'verbs' of back end 'fake': {e}") from None
        if len(verbs & {Verb.SEND, Verb.RECV}) == 1:
            raise ConfigError("option 'verbs' of back end 'fake': send and recv come together")
        self._capabilities = Capabilities(
            verbs=verbs, memory=frozenset(o["memory"]), same_host=True, run_bytes=o["run_bytes"], gathers=o["gathers"],
            factored=o["factored"], abort=o["abort"], quiet=o["quiet"],
        )  # fmt: skip
        self._net: Network = o["network"]
        self._delay_s: float = o["delay_s"]
        self._chances: list[tuple[Fault, float]] = [(f, o[f]) for f in ("lose", "corrupt", "fail")]
        self._random = random.Random(o["seed"])
        self._id = uuid.uuid4().hex
        self._thread = threading.get_ident()
        self._memories = Memories()
        self._endpoints: set[str] = set()
        self._sealed = self._closed = self._dead = self._stopped = False
        self._sides: dict[int, _Side] = {}
        self._numbers = 0
        self._done: list[Completion] = []
        self._wakeup = Wakeup()
        self._has_fileno: bool = o["wakeup"]
        with self._net._lock:
            self._net._members.append(self)

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
        with self._net._lock:
            return self._memories.add(regions, self._capabilities.memory)

    def deregister(self, memory: int) -> None:
        self._check()
        with self._net._lock:
            if any(memory == p.batch.local for s in self._sides.values() for p in s.posts):
                raise TransportError(f"memory {memory} is in use by a batch in flight")
            self._memories.remove(memory)

    def endpoint(self) -> bytes:
        self._check()
        self._sealed = True
        link = uuid.uuid4().hex
        self._endpoints.add(link)
        return json.dumps({"fake": id(self._net), "agent": self.agent, "link": link}).encode()

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check()
        own, their = _parse(mine), _parse(theirs)
        if own["link"] not in self._endpoints:
            raise TransportError("the first argument of connect is not an unused endpoint of this transport")
        if their["fake"] != id(self._net):
            raise TransportError(f"the endpoint of {their['agent']!r} belongs to another network or process")
        if own["link"] == their["link"]:
            raise TransportError("both endpoints are the same")
        self._endpoints.remove(own["link"])
        with self._net._lock:
            peer = self._new_number()
            side = _Side(self, peer, frozenset((own["link"], their["link"])), their["agent"])
            self._sides[peer] = side
            ends = self._net._links.setdefault(side.key, [])
            ends.append(side)
            if len(ends) == 2:
                ends[0].other, ends[1].other = ends[1], ends[0]
                for end in ends:
                    end.owner._wakeup.set()
            return peer

    def disconnect(self, peer: int) -> None:
        self._check()
        with self._net._lock:
            side = self._sides.pop(peer, None)
            if side is None:
                return
            for p in list(side.posts):
                self._fail(p, "the link was closed here", closing=True)
            if self._capabilities.quiet in ("batch", "peer_close"):
                self._net._ghosts = [g for g in self._net._ghosts if g.side is not side]
            self._net._links.pop(side.key, None)
            if side.other is not None:
                side.other.fail(f"{self.agent!r} closed the link")

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._check()
        if batch.verb not in self._capabilities.verbs:
            raise TransportError(f"back end 'fake' was told not to offer {batch.verb}")
        with self._net._lock:
            side = self._sides.get(batch.peer)
            if side is None:
                raise TransportError(f"there is no link {batch.peer}")
            local, remote, lengths = batch.local_offsets, batch.remote_offsets, batch.lengths
            if batch.plan is not None:
                if not self._capabilities.factored:
                    raise TransportError("a plan was given to a back end that is not factored")
                runs, outwards = batch.plan.runs(), batch.verb in (Verb.WRITE, Verb.SEND)
                local, remote = (runs.src, runs.dst) if outwards else (runs.dst, runs.src)
                lengths = runs.length
            addresses = self._memories.addresses(batch.local, local, lengths)
            if batch.verb in (Verb.READ, Verb.WRITE):
                if remote is None or len(remote) != len(lengths):
                    raise TransportError(f"{batch.verb} needs one remote offset a run")
            else:
                remote = None
                if batch.stream <= side.last_stream.get(batch.verb, -1):
                    raise TransportError(f"stream numbers must rise: {batch.verb} {batch.stream} on link {batch.peer}")
                side.last_stream[batch.verb] = batch.stream
            post = _Post(
                self._new_number(), batch, side, addresses, remote, lengths, after,
                time.monotonic() + self._delay_s + self._net.delay_s, self._fate(batch),
            )  # fmt: skip
            side.posts.append(post)
            if side.broken is not None:
                self._fail(post, side.broken)
            self._wakeup.set()
            if side.other is not None:
                side.other.owner._wakeup.set()
            return post.number

    def poll(self) -> list[Completion]:
        self._check()
        with self._net._lock:
            self._wakeup.clear()
            if self._dead or self._stopped:
                return []
            now = time.monotonic()
            for side in list(self._sides.values()):
                self._advance(side, now)
            due = [
                p.due if p.due > now else now + FENCE_INTERVAL_S
                for s in self._sides.values()
                for p in s.posts
                if p.due > now or (p.after is not None and not p.after.passed())
            ]
            self._wakeup.at(min(due, default=None))
            done, self._done = self._done, []
            return done

    def abort(self, batch: int) -> None:
        self._check()
        with self._net._lock:
            for side in self._sides.values():
                post = next((p for p in side.posts if p.number == batch and not p.aborted), None)
                if post is None:
                    continue
                why = "aborted here"
                if self._capabilities.abort == "peer":
                    side.fail(why)
                    if side.other is not None:
                        side.other.fail(f"{self.agent!r} aborted the link")
                else:
                    self._fail(post, why)
                    if side.other is not None and post.batch.verb in (Verb.SEND, Verb.RECV):
                        # Its place in the stream stays, so that the peer's half meets it and fails.
                        side.posts.insert(0, post)
                        post.aborted = True
                        side.other.owner._wakeup.set()
                return

    def close(self) -> None:
        with self._net._lock:
            if self._closed:
                return
            self._closed = True
            if self in self._net._members:
                self._net._leave(self)
            if self._capabilities.quiet != "never":
                self._net._ghosts = [g for g in self._net._ghosts if g.side.owner is not self]
            self._sides.clear()
            self._wakeup.close()

    def fileno(self) -> int | None:
        return self._wakeup.fileno() if self._has_fileno else None

    def _check(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.agent!r} is closed")
        if threading.get_ident() != self._thread:
            raise TransportError(f"the transport of {self.agent!r} belongs to the thread that made it")

    def _new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _fate(self, batch: Batch) -> Fault | None:
        if batch.verb is Verb.RECV:
            return None
        for fault, chance in self._chances:
            if chance and self._random.random() < chance:
                return fault
        return self._net._fate(self.agent, batch)

    def _advance(self, side: _Side, now: float) -> None:
        other = side.other
        if other is None or side.broken or other.owner._stopped or other.owner._dead:
            return
        for p in list(side.posts):
            if p.batch.verb in (Verb.READ, Verb.WRITE) and p.ready(now):
                self._one_sided(p, other.owner._memories)
        self._two_sided(side, other, now)
        self._two_sided(other, side, now)

    def _one_sided(self, p: _Post, remote: Memories) -> None:
        if p.fate == "lose":
            return
        assert p.remote_addresses is not None  # checked by submit; offsets until now
        try:
            there = remote.addresses(p.batch.remote, p.remote_addresses, p.lengths)
        except TransportError as e:
            self._fail(p, f"the remote side refuses: {e}")
            return
        src, dst = (there, p.addresses) if p.batch.verb is Verb.READ else (p.addresses, there)
        self._move(p, src, dst)

    def _two_sided(self, source: _Side, target: _Side, now: float) -> None:
        """Pair SENDs with RECVs in stream order, as a channel without tags would."""
        while True:
            sends, recvs = source.of(Verb.SEND), target.of(Verb.RECV)
            if not sends or not recvs:
                return
            s = min(sends, key=lambda p: p.batch.stream)
            r = min(recvs, key=lambda p: p.batch.stream)
            if s.batch.stream != r.batch.stream:
                p = min(s, r, key=lambda p: p.batch.stream)
                p.side.owner._fail(p, f"the peer skipped stream {p.batch.stream}")
                continue
            if s.aborted or r.aborted:
                why = "the peer aborted this stream"
            elif list(s.lengths) != list(r.lengths):
                why = f"sizes differ: {s.batch.nbytes} bytes sent, {r.batch.nbytes} bytes wanted (or cut otherwise)"
            elif s.fate == "lose" or not (s.ready(now) and r.ready(now)):
                return
            else:
                self._move(s, s.addresses, r.addresses, r)
                continue
            for p in (s, r):
                p.side.owner._fail(p, why)

    def _move(self, p: _Post, src: Ints, dst: Ints, other_half: _Post | None = None) -> None:
        halves = [p] if other_half is None else [p, other_half]
        if p.fate == "fail":
            for h in halves:
                h.side.owner._fail(h, "failed on the network's request")
            return
        _copy(src, dst, p.lengths)
        self._net.moved_bytes += p.batch.nbytes
        longest = int(p.lengths.argmax()) if len(p.lengths) else 0
        if p.fate == "corrupt" and p.batch.nbytes:
            byte = ctypes.c_uint8.from_address(int(dst[longest]) + int(p.lengths[longest]) // 2)
            byte.value ^= 0xFF
        for h in halves:
            h.side.owner._finish(h, Completion(h.number))

    def _fail(self, p: _Post, why: str, closing: bool = False) -> None:
        if p.aborted:
            p.side.posts.remove(p)
            return
        scope = self._capabilities.quiet
        quiet = scope == "batch" or (scope == "peer_close" and closing)
        if not quiet:
            self._haunt(p)
        error = PeerError(f"{p.batch.verb} of {p.batch.nbytes} bytes with {p.side.peer_agent!r} failed: {why}")
        self._finish(p, Completion(p.number, error, quiet))

    def _finish(self, p: _Post, completion: Completion) -> None:
        p.side.posts.remove(p)
        self._done.append(completion)
        self._wakeup.set()

    def _haunt(self, p: _Post) -> None:
        """Remember what ``p`` would have moved, for ``Network.release_late``."""
        other = p.side.other
        if other is None:
            return
        if p.batch.verb in (Verb.READ, Verb.WRITE):
            assert p.remote_addresses is not None
            there, src, dst = other.owner._memories, p.addresses, p.addresses
            try:
                remote = there.addresses(p.batch.remote, p.remote_addresses, p.lengths)
            except TransportError:
                return  # it could never have moved
            src, dst = (remote, src) if p.batch.verb is Verb.READ else (src, remote)
        else:
            verb = Verb.RECV if p.batch.verb is Verb.SEND else Verb.SEND
            half = next((h for h in other.of(verb) if h.batch.stream == p.batch.stream), None)
            if half is None or list(half.lengths) != list(p.lengths):
                return
            src, dst = (p.addresses, half.addresses) if verb is Verb.RECV else (half.addresses, p.addresses)
        self._net._ghosts.append(_Ghost(p.side, lambda: _copy(src, dst, p.lengths)))


def _copy(src: Ints, dst: Ints, lengths: Ints) -> None:
    for s, d, n in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(d, s, n)


def _parse(endpoint: bytes) -> dict[str, Any]:
    try:
        value = json.loads(endpoint)
        if isinstance(value, dict) and set(value) == {"fake", "agent", "link"}:
            return value
    except ValueError:
        pass  # falls through to the one error for all malformed endpoints
    raise TransportError(f"not an endpoint of back end 'fake': {endpoint[:40]!r}")
