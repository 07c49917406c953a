"""The network between the fakes of a process: links, the pairing of SEND and RECV, faults. See ``kvxfer.testing.fake``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from kvxfer import clock
from kvxfer.backend.base import ONE_SIDED
from kvxfer.backend.memories import Memories
from kvxfer.block_table import Ints
from kvxfer.errors import PeerError, TransportError
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, Verb

Fault = Literal["lose", "corrupt", "fail"]


class NetworkMember(Protocol):
    """A fake transport, as its network sees it."""

    agent: str
    memories: Memories
    links: dict[int, LinkEnd]
    dead: bool
    stopped: bool

    @property
    def capabilities(self) -> Capabilities: ...
    def finish(self, completion: Completion) -> None: ...
    def quieted(self, number: int) -> None: ...
    def wake(self) -> None: ...
    @property
    def quiet_s(self) -> float: ...


@dataclass(eq=False)
class PendingBatch:
    """A submitted batch that has not ended."""

    number: int  # the owner's, for it
    batch: Batch
    side: LinkEnd
    addresses: Ints  # of each run, here
    remote: Ints | None  # offset of each run at the peer, for one-sided verbs
    lengths: Ints
    after: Fence | None  # to wait for, until it is found to have passed
    due: float  # when it may begin, by ``kvxfer.clock``
    fate: Fault | None
    # ended for its owner; it keeps its place in the stream, so that the other half meets it and fails
    withdrawn: bool = False

    def fenced(self) -> bool:
        """Return whether its fence has yet to pass; forget one that has."""
        if self.after is not None and self.after.passed():
            self.after = None
        return self.after is not None

    def ready(self, now: float) -> bool:
        return now >= self.due and not self.fenced()


@dataclass(eq=False)
class LinkEnd:
    """One end of a link."""

    owner: NetworkMember  # the fake whose end it is
    tokens: frozenset[str]  # the tokens of both ends
    peer_agent: str  # name of the peer
    lent: frozenset[int]  # the owner's memories that the peer may read, and write to if ``writable``
    writable: bool
    other: LinkEnd | None = None  # the other end, once it is there
    broken: PeerError | None = None  # why nothing can pass any more
    posts: list[PendingBatch] = field(default_factory=list)  # batches that have not ended

    def of(self, verb: Verb) -> list[PendingBatch]:
        return [p for p in self.posts if p.batch.verb is verb]


@dataclass
class LateBytes:
    """Bytes that may still move for a batch that has failed already, until ``quiet_at`` by ``kvxfer.clock``."""

    side: LinkEnd
    number: int
    quiet_at: float
    move: Callable[[], None]


class Network:
    """The network between fakes, by which a test disturbs them.

    The methods up to ``resume`` are for tests, from any thread; the others are for the fakes, which must hold ``lock``.

    Attributes:
        delay_s: Seconds added to every batch.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.lock = threading.RLock()
        self._members: list[NetworkMember] = []
        self._owners: dict[str, NetworkMember] = {}
        self._faults: list[Fault] = []
        self._late: list[LateBytes] = []

    def disturb(self, fault: Fault, count: int = 1) -> None:
        """Make the next ``count`` batches meet a fault.

        They are lost (neither half ever completes by itself), corrupted (one byte is flipped where it arrives), or fail. RECVs
        are not counted, because the bytes are moved by the SEND.
        """
        with self.lock:
            self._faults += [fault] * count

    def kill(self, agent: str) -> None:
        """End all fakes of that name as a killed process would end: they report nothing, but their peers notice."""
        with self.lock:
            for member in [m for m in self._members if m.agent == agent]:
                member.dead = True
                self.leave(member)

    def stop(self, agent: str) -> None:
        """Move nothing to or from this agent any more and tell nobody, as under SIGSTOP."""
        self._set_stopped(agent, True)

    def resume(self, agent: str) -> None:
        """Let the agent go on after ``stop``."""
        self._set_stopped(agent, False)

    # For the fakes, which hold the lock

    def join(self, member: NetworkMember) -> None:
        """Add a fake."""
        self._members.append(member)

    def leave(self, member: NetworkMember) -> None:
        """Remove a fake, and let its peers notice."""
        if member not in self._members:
            return
        self._members.remove(member)
        self._late = [late for late in self._late if late.side.owner is not member]
        tokens = {t for t, owner in self._owners.items() if owner is member}
        self._orphan(tokens, f"{member.agent!r} is gone (its process ended, or it closed)")

    def own(self, token: str, member: NetworkMember) -> None:
        """Record the owner of the end of a link that a token stands for."""
        self._owners[token] = member

    def disown(self, token: str) -> None:
        """Forget an end of a link that will not be made; a peer that has made its side notices."""
        self._orphan({token}, f"{self._owners[token].agent!r} has given this link up")

    def _orphan(self, tokens: set[str], why: str) -> None:
        """Forget these ends of links, and cut the sides that were connected to them."""
        for member in self._members:
            for side in member.links.values():
                if side.tokens & tokens:
                    side.other = None
                    self.cut(side, why)
        for token in tokens:
            del self._owners[token]

    def link(self, side: LinkEnd) -> None:
        """Join a new end with its other end, if that is there already."""
        for member in self._members:
            for other in member.links.values():
                if other is not side and other.tokens == side.tokens:
                    side.other, other.other = other, side
                    member.wake()
        if any(token not in self._owners for token in side.tokens):
            self.cut(side, f"{side.peer_agent!r} is gone (its process ended, or it closed)")

    def unlink(self, side: LinkEnd) -> None:
        """Close an end for its owner: all its posts end, and the peer notices."""
        for post in list(side.posts):
            self.fail(post, "the link was closed here", closing=True)
        if side.other is not None:
            self.cut(side.other, f"{side.owner.agent!r} closed the link")
        for token in [t for t in side.tokens if self._owners.get(t) is side.owner]:
            del self._owners[token]  # a peer that connects from now on finds nobody

    def settled(self, member: NetworkMember) -> list[int]:
        """Return the failed batches of a member that have become quiet by now."""
        now = clock.now()
        over = [late for late in self._late if late.side.owner is member and late.quiet_at <= now]
        self._late = [late for late in self._late if late not in over]
        return [late.number for late in over]

    def settling(self, member: NetworkMember) -> list[float]:
        """Return when failed batches of a member will be quiet, by ``kvxfer.clock``."""
        return [late.quiet_at for late in self._late if late.side.owner is member]

    def fate(self, verb: Verb) -> Fault | None:
        """Return the fault that a test has ordered for the next batch."""
        return self._faults.pop(0) if self._faults and verb is not Verb.RECV else None

    def advance(self, side: LinkEnd) -> None:
        other, now = side.other, clock.now()
        if other is None or side.broken or other.owner.stopped or other.owner.dead:
            return
        for post in [p for p in side.posts if p.batch.verb in ONE_SIDED and p.ready(now) and p.fate != "lose"]:
            try:
                src, dst = _ends(post, other)
            except TransportError as e:
                self.fail(post, f"the remote side refuses: {e}")
            else:
                self._move(post, src, dst)
        self._pair(side, other, now)
        self._pair(other, side, now)

    def cut(self, side: LinkEnd, why: str) -> None:
        """Break a side: whatever is in flight ends, and nothing passes from now on."""
        side.broken = side.broken or PeerError(why)
        for post in list(side.posts):
            self.fail(post, why)

    def withdraw(self, post: PendingBatch, why: str) -> None:
        """End one batch early."""
        self.fail(post, why)
        if post.side.other is not None and post.batch.verb not in ONE_SIDED:
            post.withdrawn = True
            post.side.posts.append(post)
            post.side.other.owner.wake()

    def fail(self, post: PendingBatch, why: str, closing: bool = False) -> None:
        """End a post in an error."""
        if post.withdrawn:
            post.side.posts.remove(post)
            return
        scope = post.side.owner.capabilities.quiet
        quiet = scope == "batch" or (scope == "peer_close" and closing)
        if scope == "later":
            self._late.append(self._bytes_of(post, clock.now() + post.side.owner.quiet_s))
        what = f"{post.batch.verb} of {post.batch.nbytes} bytes with {post.side.peer_agent!r} failed"
        self._finish(post, Completion(post.number, PeerError(f"{what}: {why}"), quiet))

    def _finish(self, post: PendingBatch, completion: Completion) -> None:
        post.side.posts.remove(post)
        post.side.owner.finish(completion)

    def _pair(self, source: LinkEnd, target: LinkEnd, now: float) -> None:
        """Let SENDs meet RECVs in the order of their streams, as on a channel without tags."""
        while (sends := source.of(Verb.SEND)) and (recvs := target.of(Verb.RECV)):
            send = min(sends, key=lambda p: p.batch.stream)
            recv = min(recvs, key=lambda p: p.batch.stream)
            if send.batch.stream != recv.batch.stream:
                first = min(send, recv, key=lambda p: p.batch.stream)
                self.fail(first, f"the peer skipped stream {first.batch.stream}")
            elif send.withdrawn or recv.withdrawn:
                self.fail(send, "the peer aborted this stream")
                self.fail(recv, "the peer aborted this stream")
            elif send.lengths.tolist() != recv.lengths.tolist():
                sizes = f"{send.batch.nbytes} bytes sent, {recv.batch.nbytes} bytes expected"
                why = f"the halves differ: {sizes}, or other lengths of runs"
                self.fail(send, why)
                self.fail(recv, why)
            elif send.fate == "lose" or not (send.ready(now) and recv.ready(now)):
                return
            else:
                self._move(send, send.addresses, recv.addresses, recv)

    def _move(self, post: PendingBatch, src: Ints, dst: Ints, other_half: PendingBatch | None = None) -> None:
        halves = [post] if other_half is None else [post, other_half]
        if post.fate == "fail":
            for half in halves:
                self.fail(half, "the network was told to let it fail")
            return
        _copy(src, dst, post.lengths)
        if post.fate == "corrupt" and post.batch.nbytes:
            longest = int(post.lengths.argmax())
            byte = ctypes.c_uint8.from_address(int(dst[longest]) + int(post.lengths[longest]) // 2)
            byte.value ^= 0xFF
        for half in halves:
            self._finish(half, Completion(half.number))

    def _bytes_of(self, post: PendingBatch, quiet_at: float) -> LateBytes:
        """Return what ``post`` would have moved."""
        other = post.side.other
        nothing = np.zeros(0, np.int64)
        ends = nothing, nothing, nothing
        try:
            if other is not None:
                ends = *_ends(post, other), post.lengths
        except TransportError:
            pass  # it could never have moved
        return LateBytes(post.side, post.number, quiet_at, lambda: _copy(*ends))

    def _set_stopped(self, agent: str, stopped: bool) -> None:
        with self.lock:
            for member in self._members:
                if member.agent == agent:
                    member.stopped = stopped
                member.wake()


def _ends(post: PendingBatch, other: LinkEnd) -> tuple[Ints, Ints]:
    """Return the addresses that a post moves from and to.

    Raises:
        TransportError: The other side has no such place.
    """
    if post.remote is not None:
        may = other.owner.capabilities.lends
        if may and (post.batch.remote not in other.lent or (post.batch.verb is Verb.WRITE and not other.writable)):
            raise TransportError(f"it does not lend memory {post.batch.remote} for this")
        there = other.owner.memories.addresses(post.batch.remote, post.remote, post.lengths)
        return (there, post.addresses) if post.batch.verb is Verb.READ else (post.addresses, there)
    wanted = Verb.RECV if post.batch.verb is Verb.SEND else Verb.SEND
    for half in other.of(wanted):
        if half.batch.stream == post.batch.stream and half.lengths.tolist() == post.lengths.tolist():
            ends = post.addresses, half.addresses
            return ends if wanted is Verb.RECV else ends[::-1]
    raise TransportError("the other half is not there")


def _copy(src: Ints, dst: Ints, lengths: Ints) -> None:
    for s, d, n in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(d, s, n)
