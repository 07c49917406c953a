"""How an agent's back end and cache go together: by which verb bytes move, when parts go staged, and whose link is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from kvxfer import facts as f
from kvxfer.config import Integrity
from kvxfer.data.staging import Staging
from kvxfer.errors import ConfigError, PeerError
from kvxfer.failures import FailureKind
from kvxfer.geometry import Cache, Incompatible, Planner, ShardAssignment
from kvxfer.protocol import messages as m
from kvxfer.protocol.parts import on_host
from kvxfer.protocol.values import LinkInfo, Mode, Role
from kvxfer.transport import Capabilities, Verb

__all__ = ["LinkPolicy", "admit", "check_facts", "lent", "stager"]

ALWAYS = 1 << 48
STRICTNESS = get_args(Integrity)
LEAST_PIECE = 4096
"""Bytes of a staged piece that a peer may ask for: smaller ones would be work without end."""
HOST_STAGING, CUDA_STAGING = 64 << 20, 512 << 20
"""Bytes of staging memory by default: a GPU's link is some ten times faster than a host's, and needs longer pieces."""
CUDA_RUN = 2 << 20
"""Rows of fewer bytes are packed on GPUs, whose link moves so many in the 5 us or more that a message or descriptor costs."""


@dataclass(frozen=True)
class LinkPolicy:
    """How links use a back end; fixed for an agent's life.

    Attributes:
        backend: The back end's name.
        mode: How bytes move.
        cache: Our cache.
        piece_bytes: Bytes of a staged piece.
        stage_below: Parts whose rows are shorter on average, in bytes, are packed; 0: none is.
        integrity: How bytes are checked.
    """

    backend: str
    mode: Mode
    cache: Cache
    piece_bytes: int
    stage_below: int
    integrity: Integrity

    @classmethod
    def of(
        cls, backend: str, caps: Capabilities, staging: Staging, cache: Cache, integrity: Integrity = "off"
    ) -> LinkPolicy:
        """Return how links use a back end of these capabilities, with this staging memory, for this cache."""
        mode = _mode(caps)
        if _foreign(caps, cache) or not caps.gathers:
            below = ALWAYS
        elif caps.factored:
            below = 0
        else:
            below = caps.run_bytes if on_host(cache.regions) else max(caps.run_bytes, CUDA_RUN)
        if mode == "write" and not _closes(caps):
            below = ALWAYS  # closing a link would not keep its writes out of the cache
        return cls(backend, mode, cache, staging.piece_bytes, below, integrity)

    def hello(
        self,
        endpoint: bytes,
        expect: int,
        epoch: int,
        engine: str,
        assignments: Sequence[ShardAssignment],
        facts: Mapping[str, str],
    ) -> m.Hello:
        """Return what a consumer says first over a link: where it listens, what it is, and how it would move which shards."""
        return m.Hello(
            m.PROTOCOL,
            self.backend,
            expect,
            epoch,
            engine,
            endpoint,
            self.cache,
            tuple(assignments),
            self.mode,
            self.piece_bytes,
            self.integrity,
            dict(facts),
            self.stage_below,
        )

    def agree(self, hello: m.Hello, planner: Planner, name: str = "") -> LinkInfo:
        """Return how the link works on which an admitted hello and we agree.

        Raises:
            PeerError: The link is refused, with the reason.
        """
        if hello.mode != self.mode:
            raise _misfit(
                f"{hello.engine!r} uses back end {self.backend!r} by {hello.mode}, this engine by {self.mode}; configure it "
                "alike on both"
            )
        if hello.piece_bytes < LEAST_PIECE:
            raise _misfit(f"{hello.engine!r} takes pieces of {hello.piece_bytes} bytes; {LEAST_PIECE} is the least")
        integrity = max(self.integrity, hello.integrity, key=STRICTNESS.index)
        piece_bytes = min(self.piece_bytes, hello.piece_bytes)
        stage_below = max(self.stage_below, hello.stage_below)  # either side may have what its back end cannot move
        return LinkInfo(self.mode, planner, hello.epoch, piece_bytes, stage_below, integrity, name=name)

    def accept(self, welcome: m.Welcome) -> None:
        """Check a producer's answer to our hello.

        Raises:
            PeerError: It is not what we asked for.
        """
        if not LEAST_PIECE <= welcome.piece_bytes <= self.piece_bytes:
            raise _misfit(f"its pieces have {welcome.piece_bytes} bytes, and ours {self.piece_bytes}")
        if STRICTNESS.index(welcome.integrity) < STRICTNESS.index(self.integrity):
            raise _misfit(
                f"it checks bytes less ({welcome.integrity!r}) than this engine asks for ({self.integrity!r})"
            )


def admit(
    hello: m.Hello, candidates: Sequence[str], cache: Cache, epoch: int, facts: Mapping[str, str] | None
) -> Planner:
    """Check all of a consumer's hello that does not depend on what a back end can do; return the planner of the link's copies.

    Raises:
        PeerError: The link is refused, with the reason.
    """
    if hello.protocol != m.PROTOCOL:
        raise _misfit(f"protocol {hello.protocol} of {hello.engine!r} is not ours ({m.PROTOCOL}); update one side")
    if hello.expect_epoch != epoch:
        why = f"{hello.engine!r} looks for an agent that lived here before; this one started later"
        raise PeerError(why, kind=FailureKind.PEER_LOST)
    check_facts(hello, facts)
    if hello.backend not in candidates:
        raise _misfit(
            f"{hello.engine!r} uses back end {hello.backend!r}, this engine {' or '.join(map(repr, candidates))}; configure the "
            "same on both"
        )
    try:
        hello.cache.check()
        return Planner(cache, hello.cache, hello.assignments)
    except (Incompatible, ValueError) as e:
        raise _misfit(f"the caches do not fit: {e}") from None


def check_facts(hello: m.Hello, facts: Mapping[str, str] | None) -> None:
    """Refuse a consumer whose KV depends on something else than ours.

    ``facts`` are ``None`` while our engine has not said it yet; then the consumer has compared what our directory states.

    Raises:
        PeerError: They differ.
    """
    why = None if facts is None else f.difference(facts, hello.facts, "at the consumer")
    if why is not None:
        raise _misfit(f"{hello.engine!r} asks for KV of this engine, but {why}")


def stager(cache: Cache, nbytes: int | None) -> Callable[[Capabilities], Staging]:
    """Return what makes staging memory of so many bytes, or by default, once the back end's capabilities are known."""

    def make(caps: Capabilities) -> Staging:
        kinds = {r.device.partition(":")[0] for r in cache.regions}
        if kinds <= caps.memory:
            device = next((r.device for r in cache.regions), "cpu")  # a rank may hold nothing
        elif "cpu" in caps.memory:
            device = "cpu"
        else:
            raise ConfigError(f"the back end moves {sorted(caps.memory)} memory, the cache is in {sorted(kinds)}")
        return Staging(cache.regions, nbytes or (HOST_STAGING if device == "cpu" else CUDA_STAGING), device)

    return make


def lent(caps: Capabilities, role: Role) -> tuple[frozenset[int], bool]:
    """Tell which of our memory the peer of a link needs. Where one side reads or writes, it needs the other's; else neither does.

    Return the numbers of the memory (0: the cache, 1: staging), and whether the peer writes to it.
    """
    mode, serves = _mode(caps), role == "producer"
    if mode == "read":
        return (frozenset({0, 1}) if serves else frozenset()), False
    if mode == "write" and not serves:
        return frozenset({0, 1} if _closes(caps) else {1}), True
    return frozenset(), False


def _misfit(why: str) -> PeerError:
    return PeerError(why, kind=FailureKind.INCOMPATIBLE)


def _mode(caps: Capabilities) -> Mode:
    if Verb.READ in caps.verbs:
        return "read"
    return "write" if Verb.WRITE in caps.verbs else "sendrecv"


def _closes(caps: Capabilities) -> bool:
    """Whether closing a link ends what its peer writes."""
    return caps.quiet in ("batch", "peer_close")


def _foreign(caps: Capabilities, cache: Cache) -> bool:
    """Whether some of the cache lies in memory that the back end cannot move as it is."""
    return not all(map(caps.moves, cache.regions))
