"""What the world is made of: sizes and times, the script, agents, links, and parts on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer.geometry import Cache, CopyPlan, Group, Rank, Region, View
from kvxfer.identity import TransferId
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.values import PartRef
from kvxfer.transport import Verb

RANKS = 2
LAYERS = 3  # of each producer rank, and a band each
BLOCKS = 24
UNIT = 4
P_TOKENS, D_TOKENS = 2, 4  # tokens of a block on either side
TIMEOUT, RETRY, LEASE = 8.0, 1.0, 10.0
START = 7.0  # a first part has to come within this, the rest within TIMEOUT of it
LONGEST = 7.0  # a want is kept for so long
SILENCE = 3.0  # a link that is cut is known to be lost after this at most
LATEST = 0.4  # a message that is not lost arrives within this
QUIET = 4.0  # a back end's memory is quiet within this of a failure
FREE, GARBAGE = 0, 0xEE
TRANSFERS = [(TransferId("t", i), 1 + i) for i in range(12)]
"""Those that there can be, and how many tokens they have."""


class Violation(AssertionError):
    """A promise was broken."""


def check(condition: Any, what: str) -> None:
    if not condition:
        raise Violation(what)


@dataclass(frozen=True)
class Setting:
    """``mode``: the verb of the links. ``staged``: parts go through staging memory. ``scope``: what an abort ends.
    ``preempts``: how many requests of twelve are preempted and computed anew. ``faults``: whether anything else goes wrong.
    ``integrity``: what is hashed; ``by_itself``: by the device, at a consumer, as soon as
    it is there. ``seen``: consumers see producers' tallies."""

    mode: str
    staged: bool = False
    scope: str = "batch"
    faults: bool = True
    preempts: int = 3
    integrity: str = "off"
    by_itself: bool = False
    seen: bool = False
    lease: float = LEASE


class Script:
    """Decisions, taken from bytes; after their end always the first choice."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._data)

    def pick(self, n: int) -> int:
        """A number below ``n``."""
        if n <= 1 or self.ended:
            return 0
        self._at += 1
        return self._data[self._at - 1] % n

    def chance(self, of_256: int) -> bool:
        return not self.ended and self.pick(256) >= 256 - of_256


def layers_of(rank: int) -> tuple[str, ...]:
    """The layers of a producer rank."""
    return tuple(f"layer.{rank}.{i}" for i in range(LAYERS))


def make_cache(memory: np.ndarray, layers: tuple[str, ...], tokens: int, tp: int) -> Cache:
    page = tokens * UNIT
    view = View(
        "kv", 0, layers, tuple(i * BLOCKS * page for i in range(len(layers))), BLOCKS, page, UNIT, "test", None, UNIT
    )
    return Cache((Region(memory.ctypes.data, memory.nbytes),), (Group(tokens),), (view,), Rank(0, tp))


def content(transfer: TransferId, generation: int, layer: int, token: int) -> int:
    """What the KV of a token is in a layer, whoever computes it; each time that it is computed it is a little different."""
    return (hash((transfer.prompt, generation, layer, token)) & 0x7FFFFFFF) | 0x01010101


@dataclass
class Agent:
    """One rank: a machine, its memory, and who owns its blocks."""

    role: str
    rank: int
    machine: Any
    memory: np.ndarray
    cache: Cache
    epoch: int
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    owner: dict[int, object] = field(default_factory=dict)  # block -> whoever may be written for
    tries: dict[int, object] = field(default_factory=dict)  # consumer: attempt -> owner of its blocks
    written: dict[object, int] = field(default_factory=dict)  # consumer: when the last byte came into an owner's blocks
    links: dict[Any, Link] = field(default_factory=dict)
    alive: bool = True
    revocations: RevocationCounter = field(default_factory=RevocationCounter)  # producer
    inbox: deque[Callable[[], None]] = field(
        default_factory=deque
    )  # what the engine has said and the machine not heard

    def take(self, n: int, owner: object) -> list[int] | None:
        if len(self.free) < n:
            return None
        blocks = [self.free.pop(0) for _ in range(n)]
        for b in blocks:
            self.owner[b] = owner
        return blocks

    def give(self, blocks: list[int]) -> None:
        for b in blocks:
            check(b in self.owner, f"block {b} was given back twice")
            del self.owner[b]
        self.view()[:, blocks] = GARBAGE  # somebody else uses them now
        self.free += blocks

    def view(self) -> np.ndarray:
        return self.memory.reshape(-1, BLOCKS, self.cache.groups[0].block_tokens, UNIT)


@dataclass
class Link:
    """One making of a link, with its back-end connection. Each side knows of it, or not (any more), for itself."""

    consumer: Agent
    producer: Agent
    name: Any  # the consumer's name for it
    id: bytes  # the producer's
    up_c: bool = False
    up_p: bool = False
    cut: bool = False
    closed: bool = False  # on the consumer's side: nothing can come through any more

    @property
    def works(self) -> bool:
        return not self.cut and not self.closed and self.consumer.alive and self.producer.alive


@dataclass
class Op:
    """A part on its way at one agent."""

    agent: Agent
    ref: PartRef
    verb: Verb
    link: Link
    plan: CopyPlan
    stream: int
    check: CopyPlan | None = None
    generation: int = -1  # what the producer served
    done: bool = False
    aborted: bool = False
    quiet: bool = True
    payload: bytes | None = None  # a staged write's, in slots that were lent

    @property
    def lends_memory(self) -> bool:
        """The consumer's half of a staged write."""
        return self.verb is Verb.WRITE and self.agent is self.link.consumer
