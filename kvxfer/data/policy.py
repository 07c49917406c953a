"""How an agent uses a back end for its cache: by which verb bytes move, when parts go staged, and which links are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from kvxfer import facts as f
from kvxfer.config import MIN_PIECE, Integrity
from kvxfer.data.staging import Staging
from kvxfer.errors import ConfigError, PeerError
from kvxfer.failures import FailureKind
from kvxfer.geometry import HOST, Cache, Incompatible, Planner, ShardAssignment
from kvxfer.protocol import messages as m
from kvxfer.protocol.parts import on_host
from kvxfer.protocol.peer import NOBODY, PeerIdentity
from kvxfer.protocol.values import LinkInfo, Mode, Role
from kvxfer.transport import Capabilities, Verb

ALWAYS = 1 << 48
STRICTNESS = get_args(Integrity)
HOST_STAGING, DEVICE_STAGING = 64 << 20, 512 << 20
"""The default bytes of staging memory: a GPU's link is some ten times faster than a host's, and needs longer pieces."""
DEVICE_RUN = 2 << 20
"""Rows of fewer bytes are packed on devices, whose link moves that many in the 5 us that a message or descriptor costs."""


@dataclass(frozen=True)
class LinkPolicy:
    """How links use a back end; fixed for an agent's life."""

    backend: str
    mode: Mode  # how bytes move
    cache: Cache  # as peers are told of it
    piece_bytes: int  # bytes of a staged piece
    stage_below: int  # average bytes of a row below which a part is packed; 0: none is
    integrity: Integrity  # how bytes are checked

    @classmethod
    def of(
        cls, backend: str, caps: Capabilities, staging: Staging, cache: Cache, integrity: Integrity = "off"
    ) -> LinkPolicy:
        """Return how links use a back end with these capabilities and this staging memory for this cache."""
        mode = _mode(caps)
        if _foreign(caps, cache) or not caps.gathers:
            below = ALWAYS
        elif caps.factored:
            below = 0
        else:
            below = caps.run_bytes if on_host(cache.regions) else max(caps.run_bytes, DEVICE_RUN)
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
        """Return a consumer's hello: its endpoint, what it is, which shards it reads, and how."""
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

    def agree(self, hello: m.Hello, planner: Planner, name: str = "", owner: PeerIdentity = NOBODY) -> LinkInfo:
        """Return what this side and an admitted hello agree on for the link.

        Raises:
            PeerError: The link is refused, with the reason.
        """
        if hello.mode != self.mode:
            raise unlinkable(
                f"{hello.engine!r} uses back end {self.backend!r} by {hello.mode}, this engine by {self.mode}; configure it "
                "the same on both"
            )
        if hello.piece_bytes < MIN_PIECE:
            raise unlinkable(f"{hello.engine!r} asks for pieces of {hello.piece_bytes} bytes; {MIN_PIECE} is the least")
        integrity = max(self.integrity, hello.integrity, key=STRICTNESS.index)
        piece_bytes = min(self.piece_bytes, hello.piece_bytes)
        # Either side may have memory that its back end cannot move.
        stage_below = max(self.stage_below, hello.stage_below)
        return LinkInfo(self.mode, planner, hello.epoch, piece_bytes, stage_below, integrity, name=name, owner=owner)

    def accept(self, welcome: m.Welcome) -> None:
        """Check a producer's answer to the hello.

        Raises:
            PeerError: It does not fit what this side asked for.
        """
        if not MIN_PIECE <= welcome.piece_bytes <= self.piece_bytes:
            raise unlinkable(f"its pieces have {welcome.piece_bytes} bytes, this side's {self.piece_bytes}")
        if STRICTNESS.index(welcome.integrity) < STRICTNESS.index(self.integrity):
            raise unlinkable(
                f"it checks bytes less ({welcome.integrity!r}) than this engine asks for ({self.integrity!r})"
            )


def admit(
    hello: m.Hello, candidates: Sequence[str], cache: Cache, epoch: int, facts: Mapping[str, str] | None
) -> Planner:
    """Check everything in a consumer's hello that does not depend on the back end's capabilities; return the link's planner.

    Raises:
        PeerError: The link is refused, with the reason.
    """
    if hello.protocol != m.PROTOCOL:
        raise unlinkable(
            f"{hello.engine!r} speaks protocol {hello.protocol}, this engine {m.PROTOCOL}; update one of them"
        )
    if hello.expect_epoch != epoch:
        why = f"{hello.engine!r} looks for an agent that lived here before; this one started later"
        raise PeerError(why, kind=FailureKind.PEER_LOST)
    check_facts(hello, facts)
    if hello.backend not in candidates:
        raise unlinkable(
            f"{hello.engine!r} uses back end {hello.backend!r}, this engine {' or '.join(map(repr, candidates))}; configure the "
            "same on both"
        )
    try:
        hello.cache.check()
        return Planner(cache, hello.cache, hello.assignments)
    except (Incompatible, ValueError) as e:
        raise unlinkable(f"the caches do not fit: {e}") from None


def check_facts(hello: m.Hello, facts: Mapping[str, str] | None) -> None:
    """Refuse a consumer with other facts than this engine's.

    ``facts`` are ``None`` until the engine has stated them; the consumer has then compared those that the directory states.

    Raises:
        PeerError: The facts differ.
    """
    why = None if facts is None else f.difference(facts, hello.facts, "at the consumer")
    if why is not None:
        raise unlinkable(f"{hello.engine!r} asks for KV of this engine, but {why}")


def default_staging(device: str) -> int:
    """Return the bytes of staging memory on a device if nobody says how many."""
    return HOST_STAGING if device == HOST else DEVICE_STAGING


def stager(cache: Cache, nbytes: int | None) -> Callable[[Capabilities], Staging]:
    """Return a function that makes staging memory of ``nbytes`` (``None``: the default) for a back end's capabilities."""

    def make(caps: Capabilities) -> Staging:
        kinds = {r.kind for r in cache.regions}
        if kinds <= caps.memory:
            device = next((r.device for r in cache.regions), HOST)  # a rank may hold no memory
        elif HOST in caps.memory:
            device = HOST
        else:
            raise ConfigError(f"the back end moves {sorted(caps.memory)} memory, the cache is in {sorted(kinds)}")
        return Staging(cache.regions, nbytes or default_staging(device), device)

    return make


def lent(caps: Capabilities, role: Role) -> tuple[frozenset[int], bool]:
    """Return which memories here the peer of a link needs (0: the cache, 1: staging), and whether it writes to them.

    A side that reads or writes needs the other's memory; when sending, neither does.
    """
    mode, serves = _mode(caps), role == "producer"
    if mode == "read":
        return (frozenset({0, 1}) if serves else frozenset()), False
    if mode == "write" and not serves:
        return frozenset({0, 1} if _closes(caps) else {1}), True
    return frozenset(), False


def unlinkable(why: str) -> PeerError:
    """Return the error of a peer with which there can be no link."""
    return PeerError(why, kind=FailureKind.INCOMPATIBLE)


def _mode(caps: Capabilities) -> Mode:
    if Verb.READ in caps.verbs:
        return "read"
    return "write" if Verb.WRITE in caps.verbs else "sendrecv"


def _closes(caps: Capabilities) -> bool:
    """Return whether closing a link ends what its peer writes."""
    return caps.quiet in ("batch", "peer_close")


def _foreign(caps: Capabilities, cache: Cache) -> bool:
    """Return whether some of the cache is memory that the back end cannot move directly."""
    return not all(map(caps.moves, cache.regions))
