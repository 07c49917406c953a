"""What connects the fakes of a process: links, the pairing of halves, faults. See ``kvxfer.testing.fake``."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvxfer.backend.base import ONE_SIDED
from kvxfer.backend.memories import Memories
from kvxfer.errors import PeerError, TransportError
from kvxfer.geometry.plan import Ints
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, PlanBatch, Verb

__all__ = ["Fault", "Network"]

Fault = Literal["lose", "corrupt", "fail"]


class Member(Protocol):
    """A fake transport, as its network sees it."""

    agent: str
    memories: Memories
    links: dict[int, Side]
    dead: bool
    stopped: bool

    @property
    def capabilities(self) -> Capabilities: ...
    def finish(self, completion: Completion) -> None: ...
    def wake(self) -> None: ...


@dataclass(eq=False)
class Post:
    """A submitted batch that has not ended. ``remote``: offsets at the peer for one-sided verbs. ``withdrawn``: it has
    ended for its owner, but holds its place in the stream so that the other half meets it and fails."""

    number: int
    batch: Batch | PlanBatch
    side: Side
    addresses: Ints
    remote: Ints | None
    lengths: Ints
    after: Fence | None
    due: float
    fate: Fault | None
    withdrawn: bool = False

    @property
    def fenced(self) -> bool:
        return self.after is not None and not self.after.passed()

    def ready(self, now: float) -> bool:
        return now >= self.due and not self.fenced


@dataclass(eq=False)
class Side:
    """One end of a link. ``tokens``: of both ends. ``broken``: why nothing can pass any more."""

    owner: Member
    tokens: frozenset[str]
    peer_agent: str
    other: Side | None = None
    broken: str | None = None
    posts: list[Post] = field(default_factory=list)
    last_stream: dict[Verb, int] = field(default_factory=dict)

    def of(self, verb: Verb) -> list[Post]:
        return [p for p in self.posts if p.batch.verb is verb]


@dataclass
class Ghost:
    """Bytes that may still move for a batch that has failed already."""

    side: Side
    move: Callable[[], None]


class Network:
    """The handle by which a test disturbs its fakes. The methods up to ``release_late`` are for tests, from any thread.

    ``delay_s``: added to every batch. ``moved_bytes``: all that have moved so far.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.moved_bytes = 0
        self.lock = threading.RLock()
        self._members: list[Member] = []
        self._owners: dict[str, Member] = {}
        self._faults: list[tuple[Fault, str | None, Verb | None]] = []
        self._ghosts: list[Ghost] = []

    def disturb(self, fault: Fault, count: int = 1, agent: str | None = None, verb: Verb | None = None) -> None:
        """The next ``count`` batches (of that agent and verb) are lost (no half ever completes by itself),
        corrupted (one byte is flipped where it arrives), or fail. A RECV cannot be chosen: it is the SEND that
        moves."""
        with self.lock:
            self._faults += [(fault, agent, verb)] * count

    def kill(self, agent: str) -> None:
        """End all fakes of that name as a killed process would: silent themselves, noticed by their peers."""
        with self.lock:
            for member in [m for m in self._members if m.agent == agent]:
                member.dead = True
                self.leave(member)

    def stop(self, agent: str) -> None:
        """Nothing moves to or from this agent any more and nobody is told, as under SIGSTOP."""
        self._set_stopped(agent, True)

    def resume(self, agent: str) -> None:
        self._set_stopped(agent, False)

    def release_late(self) -> int:
        """Move now the bytes of all batches that failed without being quiet and have not become quiet since, as a
        network card that was not reset might. Returns how many there were."""
        with self.lock:
            ghosts, self._ghosts = self._ghosts, []
            for ghost in ghosts:
                ghost.move()
            return len(ghosts)

    # For the fakes, which hold the lock

    def join(self, member: Member) -> None:
        self._members.append(member)

    def leave(self, member: Member) -> None:
        """The member is gone; its peers notice."""
        if member not in self._members:
            return
        self._members.remove(member)
        tokens = {t for t, owner in self._owners.items() if owner is member}
        self._orphan(tokens, f"{member.agent!r} is gone (its process ended, or it closed)")

    def own(self, token: str, member: Member) -> None:
        """Note whose end of a link a token stands for."""
        self._owners[token] = member

    def disown(self, token: str) -> None:
        """Nothing will come of the link that this was an end of; a peer that has made its side notices."""
        self._orphan({token}, f"{self._owners[token].agent!r} has given this link up")

    def _orphan(self, tokens: set[str], why: str) -> None:
        """The ends of links that these stand for are no more."""
        for member in self._members:
            for side in member.links.values():
                if side.tokens & tokens:
                    side.other = None
                    self.cut(side, why)
        for token in tokens:
            del self._owners[token]

    def link(self, side: Side) -> None:
        """Join a new side with its other one, if that is there already."""
        for member in self._members:
            for other in member.links.values():
                if other is not side and other.tokens == side.tokens:
                    side.other, other.other = other, side
                    member.wake()
        if any(token not in self._owners for token in side.tokens):
            self.cut(side, f"{side.peer_agent!r} is gone (its process ended, or it closed)")

    def unlink(self, side: Side) -> None:
        """The owner closes this side: all its posts end, the peer hears of it."""
        for post in list(side.posts):
            self.fail(post, "the link was closed here", closing=True)
        if side.owner.capabilities.quiet in ("batch", "peer_close"):
            self._ghosts = [g for g in self._ghosts if g.side is not side]
        if side.other is not None:
            self.cut(side.other, f"{side.owner.agent!r} closed the link")

    def exorcise(self, member: Member) -> None:
        """Nothing moves any more for what this member has submitted."""
        self._ghosts = [g for g in self._ghosts if g.side.owner is not member]

    def fate(self, agent: str, verb: Verb) -> Fault | None:
        """What a test has in store for the next batch."""
        for i, (fault, only_agent, only_verb) in enumerate(self._faults):
            if verb is not Verb.RECV and only_agent in (None, agent) and only_verb in (None, verb):
                del self._faults[i]
                return fault
        return None

    def advance(self, side: Side) -> None:
        """Move what can move on a link."""
        other, now = side.other, time.monotonic()
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

    def cut(self, side: Side, why: str) -> None:
        """Nothing passes from now on; whatever was in flight ends."""
        side.broken = side.broken or why
        for post in list(side.posts):
            self.fail(post, why)

    def withdraw(self, post: Post, why: str) -> None:
        """End one batch early."""
        self.fail(post, why)
        if post.side.other is not None and post.batch.verb not in ONE_SIDED:
            post.withdrawn = True
            post.side.posts.append(post)
            post.side.other.owner.wake()

    def fail(self, post: Post, why: str, closing: bool = False) -> None:
        if post.withdrawn:
            post.side.posts.remove(post)
            return
        scope = post.side.owner.capabilities.quiet
        quiet = scope == "batch" or (scope == "peer_close" and closing)
        if not quiet:
            self._haunt(post)
        what = f"{post.batch.verb} of {post.batch.nbytes} bytes with {post.side.peer_agent!r} failed"
        self._finish(post, Completion(post.number, PeerError(f"{what}: {why}"), quiet))

    def _finish(self, post: Post, completion: Completion) -> None:
        post.side.posts.remove(post)
        post.side.owner.finish(completion)

    def _pair(self, source: Side, target: Side, now: float) -> None:
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
                why = f"the halves differ: {sizes}, or cut otherwise"
                self.fail(send, why)
                self.fail(recv, why)
            elif send.fate == "lose" or not (send.ready(now) and recv.ready(now)):
                return
            else:
                self._move(send, send.addresses, recv.addresses, recv)

    def _move(self, post: Post, src: Ints, dst: Ints, other_half: Post | None = None) -> None:
        halves = [post] if other_half is None else [post, other_half]
        if post.fate == "fail":
            for half in halves:
                self.fail(half, "the network was told to let it fail")
            return
        _copy(src, dst, post.lengths)
        self.moved_bytes += post.batch.nbytes
        if post.fate == "corrupt" and post.batch.nbytes:
            longest = int(post.lengths.argmax())
            byte = ctypes.c_uint8.from_address(int(dst[longest]) + int(post.lengths[longest]) // 2)
            byte.value ^= 0xFF
        for half in halves:
            self._finish(half, Completion(half.number))

    def _haunt(self, post: Post) -> None:
        """Remember what ``post`` would have moved, for ``release_late``."""
        side, other = post.side, post.side.other
        if other is None:
            return
        try:
            src, dst = _ends(post, other)
        except TransportError:
            return  # it never could have moved
        self._ghosts.append(Ghost(side, lambda: _copy(src, dst, post.lengths)))

    def _set_stopped(self, agent: str, stopped: bool) -> None:
        with self.lock:
            for member in self._members:
                if member.agent == agent:
                    member.stopped = stopped
                member.wake()


def _ends(post: Post, other: Side) -> tuple[Ints, Ints]:
    """Addresses that a post moves from and to. Raises ``TransportError`` if the other side has no such place."""
    if post.remote is not None:
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
