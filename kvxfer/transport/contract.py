"""The contract of a back end: it moves bytes between registered memory of two processes.

It says nothing of KV, requests or engines. A back end is a class derived from ``Transport``, found through
the entry point group ``kvxfer.backends``, and tested by subclassing ``kvxfer.testing.ConformanceSuite``.

**Threads.** One thread (the agent's data thread) makes the object and calls every method. Another thread may call only
``close``, and only after that thread has ended. No method may block for longer than ``Capabilities.may_block_s``.

**Memory.** ``register`` takes a list of regions and gives them one flat offset space (``flat_starts``); batches refer to
bytes by ``(memory, flat offset, length)``. Memories are numbered 0, 1, 2 ... in the order of registration; the peer names
them by these numbers. Memory may be registered and deregistered at any time. A link reaches the memory that was registered
when its endpoint was made; memory registered later is reached by later links. Batches of peers do not keep ``deregister``
from succeeding: those that they begin afterwards fail, at the latest once the links that lent the memory are closed.

**Peers.** For every new link, each side calls ``endpoint`` once and sends the bytes to the other side over kvxfer's control
connection; then both call ``connect(mine, theirs)``, or ``withdraw`` if the link is not made. ``connect`` returns at once;
batches for a link that is still being made wait inside the back end. Two links between the same two agents are independent.

**Verbs.** ``READ`` and ``WRITE`` are one-sided: only one side submits. ``SEND`` and ``RECV`` are two-sided. For each link and
direction, both sides submit batches with the same ``lengths`` in the same order, and with the same ``stream`` number, so that
a back end without tags can match them by order and one with tags can check. Stream numbers rise, separately for each link
and direction, from any start and with gaps of any size. Neither half is submitted before both sides have agreed to it.

**Completion.** Every accepted batch ends in exactly one ``Completion`` from ``poll``. Success means that all bytes are
*visible* at the target to anyone who is told so over any other channel. ``quiet`` means that this batch can no longer
read or write memory on this side. A failed batch that is not quiet becomes so as ``Capabilities.quiet`` says, and ``poll``
may then return a ``Quieted`` for it. The bytes that a failed batch was to fill are undefined
afterwards, and no other byte has changed. A batch that names memory or bytes that the peer never had moves nothing.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.failures import Failure
from kvxfer.fence import Fence
from kvxfer.geometry.plan import CopyPlan
from kvxfer.geometry.region import Region
from kvxfer.geometry.tensor import HOST

__all__ = [
    "CONTRACTS",
    "CONTRACT_VERSION",
    "MAX_ENDPOINT",
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

MAX_ENDPOINT = 1 << 20
"""The most bytes of an endpoint."""

CONTRACT_VERSION = 2
"""The newest contract. It goes up when a back end written for it could misbehave with an older kvxfer."""

CONTRACTS = frozenset({1, 2})
"""The contracts that a back end may declare (``Transport.contract``), checked when it is loaded. Contract 1 has no ``Quieted``, and
does not allow memory to be registered after the first ``endpoint``."""


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
            peer's batch has them.
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
    """The end of a batch, of which there is exactly one. ``error`` is ``None`` on success, else names the peer and the cause."""

    batch: int
    error: Exception | None = None
    quiet: bool = True


@dataclass(frozen=True)
class Quieted:
    """Follows the completion of a batch that was not quiet: it no longer reads or writes memory of this side."""

    batch: int


@dataclass(frozen=True)
class Capabilities:
    """What a back end can do, fixed when it is made.

    Attributes:
        verbs: What ``submit`` takes (``SEND`` and ``RECV`` together or not at all).
        memory: The kinds of region that it moves (``cpu``, ``cuda``).
        elastic: Whether it takes regions whose pages may be remapped while they are registered, so that each batch must use
            the pages mapped at the time. A back end whose registration pins pages (for a network card, or exported to another process)
            must leave this false; elastic memory is then moved staged.
        run_bytes: Below this average run length, packing into one long run is cheaper than submitting the runs.
        gathers: Whether a batch of many runs costs little more than one of a single run. If not, all is staged as long runs.
        factored: Whether it takes a ``PlanBatch`` as well as a ``Batch``.
        may_block_s: The longest time, in seconds, for which a call holds up the data thread, computing or waiting, on a host
            that has a processor to spare for it. Making and closing a back end may take longer.
        abort: What ``abort`` ends: that ``batch``, or everything on the link to that ``peer``.
        quiet: What makes this side's memory quiet after a failure: the failed ``batch``'s completion, closing the link
            (``peer_close``), time (``later``: a ``Quieted`` follows when the library is done; if that takes too long, the back
            end is closed), closing the back end (``backend_reset``), or nothing (``never``).
        lends: Whether the peer of a link reaches only the memory that its endpoint lends, and writes to it only where that is
            allowed (``endpoint_lending``). It says nothing of a back end without ``READ`` and ``WRITE``.
    """

    verbs: frozenset[Verb]
    memory: frozenset[str] = frozenset({HOST})
    elastic: bool = False
    run_bytes: int = 16384
    gathers: bool = True
    factored: bool = False
    may_block_s: float = 0.05
    abort: Literal["batch", "peer"] = "batch"
    quiet: Literal["batch", "peer_close", "later", "backend_reset", "never"] = "batch"
    lends: bool = False

    def moves(self, region: Region) -> bool:
        """Return whether the back end takes this region, by its kind of memory and by whether it is elastic."""
        return region.kind in self.memory and (self.elastic or not region.elastic)


@dataclass(frozen=True)
class Probe:
    """Whether a back end can be used in this process, and the ``reason`` why or why not, in words for a user.

    ``memory``: the kinds that it could move here; ``facts``: versions and settings for ``kvxfer doctor``.
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
    """Which of the options ``listen`` (address to bind to) and ``advertise`` (host name or address for peers) this back
    end has. The agent fills them in from its own settings if the user set none of them."""
    guarded: ClassVar[Literal["always", "loopback", "never"]] = "never"
    """When its ports and sockets are of no use to anyone but peers who know a secret from this side's endpoint: ``always``; only
    while its ``listen`` is a ``loopback`` address; or ``never``, also for a back end that opens ports elsewhere. An agent that
    has a key, or listens beyond loopback, uses a back end that is not guarded there only if the operator has named it."""
    tells_hosts: ClassVar[bool] = False
    """Whether ``dials`` tells of every host that it may dial. If not, the operator's list of peers does not cover all that it
    dials, which ``kvxfer doctor`` says."""
    opens_later: ClassVar[str] = ""
    """Ports that it opens only once links are made and used: where and by whom, in words for ``kvxfer doctor``."""
    encrypted_by: ClassVar[str] = ""
    """The name of the boolean option by which it encrypts what it moves, for ``kvxfer doctor``; empty if it has none."""

    costs: ClassVar[Mapping[str, int]] = {}
    """The cost of moving each kind of memory (``cpu``, ``cuda``), as numbers by which ``auto`` compares back ends.

    The lowest is tried first; without a number, ``auto`` does not use it for that kind. As a guide: 10 for copies directly from
    one memory into the other, 20 for reads or writes by a network card, 30 for messages, 40 for messages that occupy part of a
    GPU, 90 for copies through the host's network stack."""
    libraries: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The libraries that it needs, for ``kvxfer doctor``: by name, the distributions of which one brings it."""
    last_resort: ClassVar[bool] = False
    """Whether ``auto`` also uses it for a kind of memory that it cannot move, after all that can, staged through host memory."""
    exclusive: ClassVar[frozenset[str]] = frozenset()
    """Libraries that a process can use only once, such as ``ucx``: ``auto`` does not combine two back ends that name the same."""
    tells: ClassVar[Mapping[str, str]] = {}
    """Environment variables that make its library log how it moves bytes, for ``kvxfer doctor --peer``, which shows what
    ``carried_by`` finds in that log."""

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self.agent = agent

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether this back end works here. May load its library, leaves no trace, never raises."""

    @classmethod
    def carried_by(cls, log: str) -> str | None:
        """Return what moves the bytes, in the words of its library's log; ``None`` if the log does not say."""
        return None

    @classmethod
    def fallbacks(cls, options: Mapping[str, Any]) -> Collection[str]:
        """Return what would make its library use a slower way on this host without saying so, for ``kvxfer doctor``.

        That may be a missing device or library, a limit, or one of these options. Loads no library.

        Raises:
            ConfigError: An option is unknown or bad.
        """
        return ()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> int:
        """Register memory, and return its number.

        Raises:
            TransportError: It cannot move such memory.
        """

    @abstractmethod
    def deregister(self, memory: int) -> None:
        """Deregister memory.

        Raises:
            TransportError: The memory is unknown, or a batch of this side still uses it.
        """

    @abstractmethod
    def endpoint(self) -> bytes:
        """Return what a peer needs to connect, fresh for every link, as at most 1 MiB; a consumer's must fit into a hello, of 256 KiB."""

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        """Return an ``endpoint`` for a link whose peer only reads these memories, or writes to them if ``writable``.

        A back end that can keep all other memory from the peer does so, and says so in ``Capabilities.lends``; this default does not.
        """
        return self.endpoint()

    def dials(self, theirs: bytes) -> Collection[str]:
        """Return the addresses of hosts that a peer's endpoint would have this process dial, as far as that is known.

        The caller of ``connect`` asks first, and connects only if the operator's list of peers covers all of them.

        Raises:
            TransportError: The endpoint is malformed.
        """
        return ()

    @abstractmethod
    def connect(self, mine: bytes, theirs: bytes) -> int:
        """Open a link from both sides' endpoints and return its number.

        Raises:
            TransportError: An endpoint is malformed or incompatible. That a peer is unreachable may show only in the
                completions of its batches.
        """

    def connect_over(self, mine: bytes, theirs: bytes, control: bytes | None) -> int:
        """``connect``, for the peer at the other end of a control connection. The agent calls this.

        Anybody may have carried the endpoints from one process to the other. So a back end that gives a peer of this host more than one
        elsewhere has both sides compare ``control`` over a socket of this host before anything moves (``LivenessLinks`` does).

        Args:
            mine: This side's endpoint.
            theirs: The peer's endpoint.
            control: The same for both ends of one control connection, and another for every other if there are keys; ``None``
                if the connection comes from another host and proves nothing.
        """
        return self.connect(mine, theirs)

    def withdraw(self, endpoint: bytes) -> None:  # noqa: B027
        """Release what is kept for an endpoint whose link will not be made.

        An endpoint that was connected or withdrawn before is ignored.
        """

    @abstractmethod
    def disconnect(self, peer: int) -> None:
        """Close a link at once. Batches in flight on it end with an error from ``poll``, never silently."""

    @abstractmethod
    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        """Start a batch and return its number, unique in this object.

        With ``after``, no memory is touched before the fence has passed.

        Raises:
            TransportError: The peer is unknown, an offset is outside registered memory, or ``capabilities`` lacks the verb
                or the kind of memory. Nothing was started.
        """

    @abstractmethod
    def poll(self) -> Sequence[Completion | Quieted]:
        """Make progress; return what has ended, and what has become quiet, because the last call.

        Never blocks longer than ``may_block_s``.
        """

    @abstractmethod
    def abort(self, batch: int) -> None:
        """Have a batch (or all of its link, see ``Capabilities.abort``) end soon; the completion still comes from ``poll``.

        Unknown or finished numbers are ignored.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything and release all resources.

        After it returns, memory is quiet unless ``quiet`` is ``never``. Idempotent.

        Raises:
            TransportError: The library has not let go of some memory, which nobody will use again.
        """

    def bytes_moved(self, batch: int) -> int:
        """Return how many bytes of a batch in flight have moved so far, as far as that is known; 0 if nothing is.

        Never more than have moved, and never less than before; the completion tells of the rest. Bytes count that the target's system has
        taken. A library that tells only of whole messages does best with messages of some MiB. The agent asks about once a second, for
        batches that take longer than that, so that a transfer that is late can say how far it got.
        """
        return 0

    def lost(self, peer: int) -> Failure | None:
        """Return why all further batches of a link will fail, or ``None`` while that is not known.

        The agent asks when a batch has failed and before each part that it moves, and replaces a lost link. Must
        not block.
        """
        return None

    def fileno(self) -> int | None:
        """Return a descriptor that polls readable when ``poll`` should be called; ``None`` to go by ``poll_interval_s``."""
        return None

    @property
    def poll_interval_s(self) -> tuple[float, float]:
        """How often to call ``poll`` without a wake-up: (with batches in flight, idle), in seconds."""
        return (0.0005, 0.1)
