"""The contract a back end fulfils: move bytes between registered memory of two processes.

No word of KV, requests or engines appears here. A back end is a class derived from ``Transport``, found through
the entry point group ``kvxfer.backends``, and proved by subclassing ``kvxfer.testing.ConformanceSuite``.

**Threads.** One thread (the agent's data thread) makes the object and calls every method; it may call from
another thread only ``close`` after that thread has ended. No method may block for longer than ``Capabilities.
may_block_s`` says.

**Memory.** ``register`` takes a list of regions and gives them one flat offset space (``flat_starts``); batches speak
of ``(memory, flat offset, length)``. Memories are numbered 0, 1, 2 ... in the order of registration; the peer names
them by these numbers. Memory may be registered and given back at any time; a link knows what was registered when its endpoint
was made, and later memory is reached by links made later. Batches of peers do not count for ``deregister``: what they begin
afterwards fails, at the latest once the links that lent the memory are closed.

**Peers.** Either side calls ``endpoint`` once for every new link and sends the bytes to the other side by a channel of
its own; then both call ``connect(mine, theirs)``, or ``withdraw`` if nothing comes of it. ``connect`` returns at once;
batches for a link that is still being made wait inside the back end. Two links between the same two agents are independent.

**Verbs.** ``READ`` and ``WRITE`` are one-sided: only one side submits. ``SEND`` and ``RECV`` are two-sided: both submit
batches with the same ``lengths`` in the same order on a link and direction, and both carry the same ``stream`` number, so a back
end without tags needs none and one with tags can check. The numbers rise, for each link and direction by itself, from
anywhere and with gaps of any size. Neither half is submitted before both sides agreed to go.

**Completion.** Every accepted batch ends in exactly one ``Completion`` from ``poll``. Success means that all bytes are
*visible* at the target to anyone told over any other channel. ``quiet`` says that this batch can no longer
read or write memory on this side; a failed batch that is not quiet gets quiet by ``Capabilities.quiet``, and may be followed by
a second word, ``Quieted``, when it is.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from kvxfer.failures import Failure
from kvxfer.fence import Fence
from kvxfer.geometry.cache import Region
from kvxfer.geometry.plan import CopyPlan, Ints

__all__ = [
    "CONTRACTS",
    "CONTRACT_VERSION",
    "Batch",
    "Capabilities",
    "Completion",
    "Fence",
    "PlanBatch",
    "Probe",
    "Quieted",
    "Transport",
    "Verb",
]

CONTRACT_VERSION = 2
"""The newest contract. Raised when a back end that uses all of it could misbehave on an older kvxfer."""

CONTRACTS = frozenset({1, 2})
"""Contracts that are taken, compared with ``Transport.contract`` at load. 1 is 2 without ``Quieted``, and refuses memory that is registered
after the first ``endpoint``."""


class Verb(enum.StrEnum):
    """How a batch moves its bytes."""

    READ = "read"
    WRITE = "write"
    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True)
class Batch:
    """Runs of bytes to move on one link.

    Attributes:
        verb: How they are moved.
        peer: Number of the link.
        local: Number of the memory on this side.
        lengths: Bytes of each run, int64 ``[n]``.
        local_offsets: Flat offset of each run in ``local``, int64 ``[n]``.
        remote: Number of the memory at the peer, for ``READ`` and ``WRITE``.
        remote_offsets: Flat offset of each run in ``remote``, int64 ``[n]``; ``None`` for ``SEND`` and ``RECV``, where the
            other place is the peer's business.
        stream: Number of the stream, for ``SEND`` and ``RECV``.
    """

    verb: Verb
    peer: int
    local: int
    lengths: Ints
    local_offsets: Ints
    remote: int = 0
    remote_offsets: Ints | None = None
    stream: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all runs together."""
        return int(np.sum(self.lengths))


@dataclass(frozen=True)
class PlanBatch:
    """A copy plan to carry out on one link, for back ends whose ``Capabilities.factored`` is true.

    Attributes:
        verb, peer, local, remote, stream: As in ``Batch``.
        plan: What to move. Its source is local for ``WRITE`` and ``SEND``, and remote for ``READ`` and ``RECV``.
    """

    verb: Verb
    peer: int
    local: int
    plan: CopyPlan
    remote: int = 0
    stream: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole plan."""
        return self.plan.nbytes


@dataclass(frozen=True)
class Completion:
    """The one end of a batch. ``error`` is ``None`` on success, else names the peer and the cause."""

    batch: int
    error: Exception | None = None
    quiet: bool = True


@dataclass(frozen=True)
class Quieted:
    """The second word on a batch that ended without being quiet: it reads and writes no memory of this side any more."""

    batch: int


@dataclass(frozen=True)
class Capabilities:
    """What a back end can do, fixed when it is made.

    ``verbs``: what ``submit`` takes (``SEND`` and ``RECV`` together or not at all).
    ``memory``: kinds of region it moves (``cpu``, ``cuda``).
    ``elastic``: takes regions whose pages are mapped anew while they are registered: each batch finds the pages of its moment. A
    registration that keeps pages (pinned for a card, exported to another process) must not say so; then what is elastic goes staged.
    ``run_bytes``: below this average run length packing into one long run is cheaper than submitting the runs.
    ``gathers``: takes many runs a batch at small cost (false: the session gives it single long runs, staged).
    ``factored``: takes a ``PlanBatch`` as well as a ``Batch``.
    ``may_block_s``: longest time, in seconds, for which one call holds the data thread up, by computing or by waiting, on a host that has a
    processor for it. Making and closing a back end may take longer.
    ``abort``: what ``abort`` ends: one ``batch``, or everything with that ``peer``.
    ``quiet``: what makes this side's memory quiet after a failure: the failed ``batch``'s completion, closing the peer
    (``peer_close``), time (``later``: a ``Quieted`` follows when the library is done; if that takes too long, closing the whole back
    end), closing the whole back end (``backend_reset``), or ``never``.
    """

    verbs: frozenset[Verb]
    memory: frozenset[str] = frozenset({"cpu"})
    elastic: bool = False
    run_bytes: int = 16384
    gathers: bool = True
    factored: bool = False
    may_block_s: float = 0.05
    abort: Literal["batch", "peer"] = "batch"
    quiet: Literal["batch", "peer_close", "later", "backend_reset", "never"] = "batch"

    def moves(self, region: Region) -> bool:
        """Tell whether the back end takes this region, by its kind of memory and by how its pages are mapped."""
        return region.device.partition(":")[0] in self.memory and (self.elastic or not region.elastic)


@dataclass(frozen=True)
class Probe:
    """Whether a back end can be used in this process, and why or why not, in words for a user.

    ``memory``: kinds it could move here; ``facts``: versions and settings for ``kvxfer doctor``.
    """

    usable: bool
    reason: str
    memory: frozenset[str] = frozenset()
    facts: Mapping[str, str] = field(default_factory=dict)


class Transport(ABC):
    """Base class of back ends.

    Args:
        agent: The agent's name.
        options: The user's ``backend_options``.

    Raises:
        ConfigError: An option is unknown or bad; the message names the nearest valid one.
        TransportError: The library is missing, or cannot start; the message has the pip line that installs it.
    """

    name: ClassVar[str]
    contract: ClassVar[int]
    inherits: ClassVar[frozenset[str]] = frozenset()
    """Options that an agent fills in from its own settings where the user set none of them: of ``listen`` (address to
    bind to) and ``advertise`` (host name or address for peers), those that this back end has."""
    guarded: ClassVar[Literal["always", "loopback", "never"]] = "never"
    """Whether whoever reaches what it opens gets nothing from it, unless he shows a secret that this side's endpoint has told the
    peer of a link: ``always``; only while its ``listen`` is a ``loopback`` address; or ``never``, which is also for one that opens
    ports elsewhere. An agent that has a key, or listens beyond loopback, takes one that is not guarded there only if the operator has
    named it."""
    opens_later: ClassVar[str] = ""
    """Ports that it opens once links are made and used, and not before, in words for ``kvxfer doctor``: where, and by whom."""
    encrypted_by: ClassVar[str] = ""
    """The option, true or false, by which it encrypts what it moves, for ``kvxfer doctor``; empty where it has none."""

    costs: ClassVar[Mapping[str, int]] = {}
    """What it costs to move each kind of memory (``cpu``, ``cuda``), in figures by which ``auto`` compares back ends.

    The least comes first; a kind without a figure is not taken. For orientation: 10, straight from one memory into the other;
    20, reads or writes that a network card carries out; 30, messages; 40, messages that take part of a GPU; 90, copies through
    the network of the host."""
    libraries: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """What it needs, for ``kvxfer doctor``: a library's name, and names of distributions one of which has it."""
    last_resort: ClassVar[bool] = False
    """Whether ``auto`` takes it also for a kind of memory that it cannot move, after all that can: through host memory."""
    exclusive: ClassVar[frozenset[str]] = frozenset()
    """Libraries of which a process can have only one at work, such as ``ucx``: two back ends that both bring one do not go
    together."""
    tells: ClassVar[Mapping[str, str]] = {}
    """What in the environment makes its library log how it moves bytes, for ``kvxfer doctor --peer``, which shows what ``carried_by``
    finds in that log."""

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self.agent = agent

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Say whether this back end works here. Loads its library if it must, leaves no trace, never raises."""

    @classmethod
    def carried_by(cls, log: str) -> str | None:
        """Return what moves the bytes of its links, in its library's words, by the log of a process; ``None`` if that does not say."""
        return None

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> int:
        """Make memory known, and return its number.

        Raises:
            TransportError: It cannot move such memory.
        """

    @abstractmethod
    def deregister(self, memory: int) -> None:
        """Forget memory.

        Raises:
            TransportError: It is unknown, or a batch in flight still uses it.
        """

    @abstractmethod
    def endpoint(self) -> bytes:
        """Return what a peer needs to connect, fresh for every link; at most 1 MiB, safe to send anywhere."""

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        """Return an ``endpoint`` for a link whose peer needs only these memories.

        It reads them, or writes to them if ``writable``. A back end that can keep the rest
        from the peer does so; this one shows it all that is registered.
        """
        return self.endpoint()

    @abstractmethod
    def connect(self, mine: bytes, theirs: bytes) -> int:
        """Open a link from both sides' endpoints and return its number.

        Raises:
            TransportError: A malformed or incompatible endpoint; an unreachable peer may show only in the
                completions of its batches.
        """

    def withdraw(self, endpoint: bytes) -> None:  # noqa: B027
        """Give back what is kept for an endpoint whose link will not be made.

        One that was connected or withdrawn before is ignored.
        """

    @abstractmethod
    def disconnect(self, peer: int) -> None:
        """Close a link at once. Batches in flight complete with an error (from ``poll``), never silently."""

    @abstractmethod
    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        """Start a batch and return its number, unique in this object.

        With ``after``, nothing is touched before the fence has passed.

        Raises:
            TransportError: An unknown peer, offsets outside registered memory, or a verb or memory kind that
                ``capabilities`` lacks; then nothing was started.
        """

    @abstractmethod
    def poll(self) -> Sequence[Completion | Quieted]:
        """Return what has ended, and what has become quiet, since the last call; drives progress.

        Never blocks longer than ``may_block_s``.
        """

    @abstractmethod
    def abort(self, batch: int) -> None:
        """End a batch (or all of its peer's, see ``Capabilities.abort``) soon; its completion still comes from ``poll``.

        Unknown or finished numbers are ignored.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything and give all resources back.

        After it returns, memory is quiet unless ``quiet`` is ``never``. Idempotent.

        Raises:
            TransportError: The library has not let go of some memory, which nobody will use again.
        """

    def lost(self, peer: int) -> Failure | None:
        """Return why a link is of no more use (its batches will all fail), or ``None`` while that is not known.

        The session asks when a batch has failed and before each part that it moves, and makes a lost link anew. Must
        not block.
        """
        return None

    def fileno(self) -> int | None:
        """Return a descriptor that polls readable when ``poll`` should be called.

        ``None``: ``poll_interval_s`` counts.
        """
        return None

    @property
    def poll_interval_s(self) -> tuple[float, float]:
        """How often to call ``poll`` without a wake-up: (with batches in flight, idle), in seconds."""
        return (0.0005, 0.1)
