"""``Base``: what all back ends have in common apart from their libraries."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Generic, Protocol, TypeVar

from kvxfer import clock
from kvxfer.backend.endpoint import EndpointBase
from kvxfer.backend.link import LinkBase
from kvxfer.backend.memories import Memories
from kvxfer.backend.wakeup import Wakeup
from kvxfer.errors import KvxferError, TransportError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry.region import Region
from kvxfer.identity import is_ip
from kvxfer.transport.contract import Batch, Completion, Fence, PlanBatch, Quieted, Transport, Verb

__all__ = ["ONE_SIDED", "Base"]

ONE_SIDED = frozenset({Verb.READ, Verb.WRITE})
"""Verbs that only one side submits."""


class _Link(Protocol):
    """What ``Base`` has to know about a link that is no ``LinkBase``."""

    @property
    def broken(self) -> KvxferError | None:
        """The error with which all further batches fail; ``None`` while the link is not known to be broken."""


E = TypeVar("E", bound=EndpointBase)
L = TypeVar("L", bound=_Link)


class Base(Transport, Generic[E, L]):
    """A transport that keeps tables of memory, links and batches, and leaves the moving to its subclass.

    It implements the methods of the contract: they check thread, lifecycle and arguments, number links and batches, and then
    call a method of the subclass. A subclass must define ``make_endpoint``, ``make_link``, ``drop_link``, ``start``, ``stop``,
    ``advance`` and ``shut_down``, and may define ``add_memory``, ``drop_memory``, ``drop_endpoint`` and ``start_plan``.
    These are called on the thread that made the object (``shut_down`` perhaps on another, after that thread has ended).
    If one cannot do what is asked, it must fail with ``TransportError`` and leave everything as it was.

    ``submit`` also enforces the order of streams: among the SENDs of a link, and among its RECVs, each must have a higher
    number than those before. A batch that is refused for another reason does not use up its number.

    ``E`` is the class of endpoints. ``L`` is the class of links: a ``kvxfer.backend.LinkBase``, or anything else with an attribute
    ``broken``, which has to see by itself that batches wait for fences, and for the link.

    Attributes:
        endpoint_type: The class ``E``.
        memories: The registered memories.
        links: The links that were made and not closed, by number.
        unused: The endpoints that were neither connected nor withdrawn, by their bytes.
        wakeup: Wakes the thread that polls ``fileno``; this class sets it after each call of the contract that changes something.
        completions: What the next ``poll`` returns.
        closed: Whether ``close`` was called.
        control: During ``make_link``, what names the control connection of the link (``Transport.connect_over``).
    """

    endpoint_type: type[E]

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        """Make the tables and ``wakeup``, whose descriptors are closed with it at the latest, as where the rest cannot be made."""
        super().__init__(agent, options)
        self.memories = Memories()
        self.links: dict[int, L] = {}
        self.unused: dict[bytes, E] = {}
        self.completions: list[Completion | Quieted] = []
        self.closed = False
        self.control: bytes | None = b""
        self.wakeup = Wakeup()
        self._thread, self._ident = threading.current_thread(), threading.get_ident()
        self._numbers = 0
        self._streams: dict[tuple[int, Verb], int] = {}
        self._in_flight: dict[int, tuple[L, int]] = {}
        self._unquiet: dict[int, tuple[L, int]] = {}
        self._timed: dict[int, LinkBase[Any]] = {}  # links that are not up, or where batches wait

    # What a subclass does

    def add_memory(self, memory: int, regions: Sequence[Region]) -> None:
        """Register memory with the library. Its regions have been checked; it is added to ``memories`` afterwards."""

    def drop_memory(self, memory: int) -> None:
        """Deregister memory from the library; no batch uses it any more."""

    @abstractmethod
    def make_endpoint(self, memories: Collection[int], writable: bool) -> E:
        """Return a fresh endpoint. Its peer will read ``memories``, or write to them if ``writable``."""

    def drop_endpoint(self, mine: E) -> None:
        """Release what is kept for an endpoint that was withdrawn."""

    @abstractmethod
    def make_link(self, number: int, mine: E, theirs: E) -> L:
        """Return a new link between two endpoints. Must not block: batches wait until the link is up."""

    @abstractmethod
    def drop_link(self, number: int, link: L) -> None:
        """Close a link at once. Call ``complete`` for each batch in flight on it, now or in ``advance``."""

    @abstractmethod
    def start(self, number: int, link: L, batch: Batch, after: Fence | None) -> None:
        """Start a batch whose verb is among the capabilities. On a broken link, let it fail by ``complete``."""

    def start_plan(self, number: int, link: L, batch: PlanBatch, after: Fence | None) -> None:
        """Start a batch that has a plan. Only if ``Capabilities.factored`` is true."""
        raise NotImplementedError

    @abstractmethod
    def stop(self, number: int, link: L) -> None:
        """Have a batch in flight end soon, by ``complete``; and all others of its link if the capability ``abort`` is ``peer``."""

    def batch_moved(self, number: int, link: L) -> int:
        """Return how many bytes of a batch in flight have moved so far; 0 if the library does not tell."""
        return 0

    @abstractmethod
    def advance(self, readable: AbstractSet[Hashable]) -> None:
        """Make progress with everything. ``readable``: the keys of those descriptors in ``wakeup`` that are readable."""

    @abstractmethod
    def shut_down(self) -> None:
        """End everything and release all but ``wakeup``. Nobody will ask for completions any more."""

    # What a subclass calls

    def complete(self, completion: Completion) -> None:
        """Report the end of a batch. If it is not quiet, call ``quieted`` once it is, unless the link or this object ends first.

        Raises:
            TransportError: The batch has ended already, or was never accepted.
        """
        use = self._in_flight.pop(completion.batch, None)
        if use is None:
            how = "succeeded" if completion.error is None else f"failed ({completion.error})"
            raise TransportError(
                f"back end {self.name!r} says that batch {completion.batch} has {how}, but no such batch is in flight: each "
                "accepted batch must end exactly once"
            )
        if not completion.quiet:
            self._unquiet[completion.batch] = use
        self.completions.append(completion)

    def quieted(self, number: int) -> None:
        """Report that a batch whose completion was not quiet no longer touches memory of this side."""
        if self._unquiet.pop(number, None) is not None:
            self.completions.append(Quieted(number))

    def number(self) -> int:
        """Return a number that is unique in this transport."""
        self._numbers += 1
        return self._numbers

    def link(self, peer: int) -> L:
        """Return a link by its number.

        Raises:
            TransportError: There is no such link.
        """
        link = self.links.get(peer)
        if link is None:
            raise TransportError(f"there is no link {peer}: it was closed, or never made")
        return link

    def check(self) -> None:
        """Check that this transport is open, and that the calling thread may use it.

        Raises:
            TransportError: It is closed, or belongs to another thread.
        """
        if self.closed:
            raise TransportError(f"the transport of {self.agent!r} is closed")
        if threading.get_ident() != self._ident:
            raise TransportError(f"the transport of {self.agent!r} belongs to the thread that made it")

    # The contract

    def register(self, regions: Sequence[Region]) -> int:
        self.check()
        kinds = self.capabilities.memory
        Memories.check(regions, kinds)
        if not all(map(self.capabilities.moves, regions)):
            raise TransportError(
                f"back end {self.name!r} pins the pages of memory when it is registered, so it cannot move elastic memory directly"
            )
        self.add_memory(self.memories.next, regions)
        return self.memories.add(regions, kinds)

    def deregister(self, memory: int) -> None:
        self.check()
        if any(memory == used for _, used in self._in_flight.values()):
            raise TransportError(f"memory {memory} is used by a batch in flight: abort it, or wait for its end")
        if any(memory == used for _, used in self._unquiet.values()):
            raise TransportError(
                f"memory {memory} is used by a batch that failed and is not quiet: wait until it is, or close the back end"
            )
        self.memories.remove(memory)
        self.drop_memory(memory)

    def endpoint(self) -> bytes:
        return self.endpoint_lending(list(self.memories), True)

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        self.check()
        mine = self.make_endpoint(memories, writable)
        try:
            data = mine.encode()
        except BaseException:
            self.drop_endpoint(mine)
            raise
        self.unused[data] = mine
        return data

    def dials(self, theirs: bytes) -> Collection[str]:
        return self.endpoint_type.decode(theirs).hosts

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.check()
        own, their = self.unused.get(mine), self.endpoint_type.decode(theirs)
        if own is None:
            raise TransportError("the first argument of connect must be an unused endpoint of this transport")
        if mine == theirs:
            raise TransportError("both endpoints are the same; connect needs one from each side")
        for host in their.hosts:  # a name would be looked up on this thread, for as long as the resolver takes
            if not is_ip(host.strip("[]")):
                raise TransportError(f"{their.agent!r} tells a name, {host!r:.300}, where peers tell addresses")
        number = self.number()
        try:
            link = self.make_link(number, own, their)
        except OSError as e:
            raise TransportError(f"no link to {their.agent!r} can be made: {e}") from e
        del self.unused[mine]
        self.links[number] = link
        if isinstance(link, LinkBase):
            self._timed[number] = link
        self.wakeup.set()
        return number

    def connect_over(self, mine: bytes, theirs: bytes, control: bytes | None) -> int:
        self.control = control
        try:
            return self.connect(mine, theirs)
        finally:
            self.control = b""

    def withdraw(self, endpoint: bytes) -> None:
        self.check()
        mine = self.unused.pop(endpoint, None)
        if mine is not None:
            self.drop_endpoint(mine)

    def disconnect(self, peer: int) -> None:
        self.check()
        link = self.links.pop(peer, None)
        if link is None:
            return
        for verb in Verb:
            self._streams.pop((peer, verb), None)
        self._timed.pop(peer, None)
        self.drop_link(peer, link)
        if self.capabilities.quiet == "peer_close":
            self._unquiet = {number: use for number, use in self._unquiet.items() if use[0] is not link}
        self.wakeup.set()

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        self.check()
        link, can = self.link(batch.peer), self.capabilities
        if batch.verb not in can.verbs:
            offered = ", ".join(sorted(v.upper() for v in can.verbs))
            raise TransportError(f"back end {self.name!r} has no {batch.verb.upper()}; it offers {offered}")
        one_sided, line = batch.verb in ONE_SIDED, (batch.peer, batch.verb)
        if not one_sided and batch.stream <= self._streams.get(line, -1):
            raise TransportError(f"stream {batch.stream} comes too late on link {batch.peer}: their numbers must rise")
        number = self.number()
        self._in_flight[number] = link, batch.local
        try:
            if isinstance(batch, Batch):
                if one_sided and batch.remote_offsets is None:
                    raise TransportError(f"a {batch.verb.upper()} needs a remote offset for each run")
                self.start(number, link, batch, after)
            elif can.factored:
                self.start_plan(number, link, batch, after)
            else:
                raise TransportError(f"back end {self.name!r} takes no plans: its capabilities are not factored")
        except BaseException:
            self._in_flight.pop(number, None)
            raise
        if not one_sided:
            self._streams[line] = batch.stream
        if isinstance(link, LinkBase) and link.waiting:
            self._timed[batch.peer] = link
        self.wakeup.set()
        return number

    def poll(self) -> list[Completion | Quieted]:
        self.check()
        self.advance(self.wakeup.clear())
        self._look(clock.now())
        done, self.completions = self.completions, []
        return done

    def _look(self, now: float) -> None:
        """See what time has done to links, and post batches that waited."""
        for number, link in list(self._timed.items()):
            due = link.look(now)
            if due < math.inf:
                self.wakeup.by(due)
            elif link.up or link.broken is not None:
                del self._timed[number]

    def abort(self, batch: int) -> None:
        self.check()
        if batch in self._in_flight:
            self.stop(batch, self._in_flight[batch][0])
            self.wakeup.set()

    def bytes_moved(self, batch: int) -> int:
        use = self._in_flight.get(batch)
        return 0 if use is None else self.batch_moved(batch, use[0])

    def lost(self, peer: int) -> Failure | None:
        link = self.links.get(peer)
        broken = None if link is None else link.broken
        return None if broken is None else Failure.of(broken, FailureKind.PEER_LOST)

    def close(self) -> None:
        if self.closed:
            return
        if threading.get_ident() != self._ident and self._thread.is_alive():
            raise TransportError(f"the transport of {self.agent!r} belongs to another thread, which is still alive")
        self.closed = True
        try:
            self.shut_down()
        finally:
            self.wakeup.close()
            for link, _ in self._in_flight.values():
                if isinstance(link, LinkBase):
                    link.forget()
            for table in (self.links, self.unused, self._in_flight, self._unquiet, self._timed):
                table.clear()

    def fileno(self) -> int | None:
        return self.wakeup.fileno()
