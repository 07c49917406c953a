"""``UcxTransport``: the links and their workers, driven by ``poll``."""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from kvxfer import clock
from kvxfer.backend import Base, Liveness, LivenessLinks, ucx
from kvxfer.backend.endpoint import new_token
from kvxfer.backend.inheritance import Uninherited
from kvxfer.backend.introduction import Introduction
from kvxfer.errors import KvxferError, TransportError
from kvxfer.geometry.region import Region
from kvxfer.logs import logger
from kvxfer.settings import loopback
from kvxfer.transport import Batch, Capabilities, Fence, Probe, Verb
from kvxfer_ucx import cuda
from kvxfer_ucx.connection import Connection
from kvxfer_ucx.endpoint import Endpoint
from kvxfer_ucx.library import NO_RDMA, load, prefers_system
from kvxfer_ucx.link import Half, Link
from kvxfer_ucx.messages import News, Pieces
from kvxfer_ucx.options import Options, make_context
from kvxfer_ucx.ways import Ways

SLICE_S = 0.002
"""``poll`` returns after this time even if UCX has more to do."""

SPIN_S = 0.0001
"""With bytes of host memory in flight, how long ``poll`` looks for more before it sleeps: about what waking up costs."""

WATCH_S, WATCH_EVERY_S = 0.003, 0.00004
"""With bytes of GPU memory in flight: for how long after something has moved, and how often, to look for more instead of being
woken. That takes a thread of CUDA's and one of ours, and the time in which a fast link moves tens of MiB."""

HOST_RUN_BYTES = 64
"""Measured: a list of pieces of this size is still twice as fast as packing."""

DEVICE_RUN_BYTES = 4 << 20
"""A message costs 5 to 10 us, in which NVLink moves this much."""

CLOSE_S, LEAST = 2.0, 300
"""How long ``close`` waits for UCX to let go of everything, and how often it looks at least, while the process stands still, too."""

_kept: list[object] = []
"""What UCX does not let go of when a transport is closed: never driven again, nor destroyed while it is in use."""
# One reference more, so that the end of the process leaves to the system what is still in here.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))

_log = logger("kvxfer.ucx")


class UcxTransport(Base[Endpoint, Link]):
    """Moves bytes with UCX's tagged messages, through ucxx. ``Options`` says what ``options`` may hold.

    The data thread is the only one: ``fileno`` is readable when UCX has work, and ``poll`` does it.
    """

    name = "ucx"
    contract = 2
    inherits = frozenset({"listen"})
    guarded = "loopback"
    costs = {"cpu": 30, "cuda": 30}
    exclusive = frozenset({"ucx"})  # it brings one, and with two at work progress has crashed
    libraries = {"ucxx": ("ucxx-cu12", "ucxx-cu13", "ucxx")}
    tells = ucx.TELLS
    endpoint_type = Endpoint
    carried_by = staticmethod(ucx.carried_by)

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        self._uninherited = Uninherited()
        self._library = load()
        self._kinds = _memory_kinds()
        chosen = self._options.split()
        self._host, self._network = (
            None if settings is None else make_context(self._library, self._options, settings)
            for settings in (chosen.host, chosen.network)
        )
        super().__init__(agent, options)
        self._liveness = LivenessLinks("ucx", self.wakeup)
        self._connections: dict[int, Connection | None] = {}  # on the network, of endpoints not used yet, by their tags
        self._on_host = True  # all memory that was ever registered
        self._awake: set[Connection] = set()  # those that have to be driven; the descriptors of the others report
        self._ending: list[Link] = []
        self._busy = False
        self._moved = 0.0  # when UCX last had anything to do
        # Whether something goes on of which ``News`` does not tell.
        self._unsettled = False
        self._news = News()

    @classmethod
    def fallbacks(cls, options: Mapping[str, Any]) -> Collection[str]:
        parsed = Options.parse(options)
        found = ucx.fallbacks(parsed.listen, parsed.given())
        if found or loopback(parsed.listen):
            return found
        return [] if prefers_system() else [NO_RDMA]

    @classmethod
    def probe(cls) -> Probe:
        try:
            library = load()
            options = Options(listen="0.0.0.0")  # what this host would allow; a context opens no port
            context = make_context(library, options, options.settings())
        except KvxferError as e:
            return Probe(False, str(e))
        # One line a resource, "... -- transport/device".
        found = sorted({line.split(" -- ")[1] for line in context.info.splitlines() if " -- " in line})
        kinds = sorted({f.split("/")[0] for f in found})
        rdma = [k for k in kinds if k.startswith(("rc_", "dc_", "ud_"))]
        facts = {
            **library.versions,
            "transports": ", ".join(found),
            "rdma": ", ".join(rdma) or "none",
            "cuda devices": str(cuda.devices()),
        }
        reason = f"UCX {library.versions['ucx']} over {', '.join(kinds)}"
        return Probe(True, reason, _memory_kinds(), facts)

    @property
    def capabilities(self) -> Capabilities:
        """``run_bytes`` holds for the memory registered so far: a message a run is dear, a piece of a message cheap."""
        return Capabilities(
            verbs=frozenset({Verb.SEND, Verb.RECV}),
            memory=self._kinds,
            run_bytes=HOST_RUN_BYTES if self._on_host else DEVICE_RUN_BYTES,
            abort="peer",
            quiet="later",
        )

    def add_memory(self, memory: int, regions: Sequence[Region]) -> None:
        devices = {r.device for r in regions if r.device != "cpu"}
        if devices and self._on_host and (self.links or self.unused):
            raise TransportError("the first memory of a GPU has to be registered before the first endpoint is made")
        for device in devices:
            cuda.use(int(device.partition(":")[2] or 0))
        self._on_host = self._on_host and not devices

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        connection = None if self._network is None else Connection(self._library, self._network, self._news)
        self._uninherited.soon()
        self._uninherited.look()
        address = b"" if connection is None else connection.address
        mine = Endpoint(self.agent, address, new_token(), self._liveness.name, secrets.randbits(64), self._on_host)
        self._connections[mine.tag] = connection
        self._liveness.offer(mine.end)
        return mine

    def drop_endpoint(self, mine: Endpoint) -> None:
        self._liveness.withdraw(mine.end)
        connection = self._connections.pop(mine.tag)
        if connection is not None:
            connection.destroy()  # it never was connected to anybody

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        with self._liveness.connected_if_here(
            mine.end, theirs.end, theirs.line, repr(theirs.agent), self.control
        ) as liveness:
            ways = self._ways(mine, theirs, liveness)
            link = Link(ways, mine, theirs, self._options.connect_timeout_s, self.complete)
        del self._connections[mine.tag]
        self._uninherited.soon()
        if link.connection is not None:
            self.wakeup.add(link.connection.epoll, link.connection)
        return link

    def _ways(self, mine: Endpoint, theirs: Endpoint, liveness: Liveness | None) -> Ways:
        """Return the ways to a peer, which is on this host if there is a socket to it (``liveness``)."""
        ways = Ways(self._connections[mine.tag], theirs.address, liveness)
        if liveness is not None:
            host = self._host

            def within() -> bytes:
                ways.host = Connection(self._library, host, self._news)
                return ways.host.address

            try:
                ways.introduction = Introduction(liveness, None if host is None else within)
            except BaseException:
                if ways.host is not None:
                    ways.host.destroy()
                raise
        return ways

    def drop_link(self, number: int, link: Link) -> None:
        link.cut(TransportError("the link was closed on this side"))
        self._ending.append(link)

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        pieces, nbytes = self._pieces(batch, merge=link.plain)
        link.submit(Half(number, after, batch.verb, batch.stream, pieces, nbytes))

    def stop(self, number: int, link: Link) -> None:
        why = f"batch {number} was aborted on this side, which ends the link: UCX cannot take back a message"
        link.cut(TransportError(why))

    def batch_moved(self, number: int, link: Link) -> int:
        data = link.flights[number].data
        return 0 if data is None else data.nbytes

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        self._liveness.handle(readable)
        self._awake.update(c for c in readable if isinstance(c, Connection))
        start = clock.now()
        self._uninherited.look(start)
        self._step(start)
        now = spun = clock.now()
        asleep = watching = False
        while not (asleep or watching or self.completions) and now < start + SLICE_S:
            if self._progress(start + SLICE_S):
                self._moved = spun = clock.now()
                if self._news.arrived or self._unsettled:
                    self._step(spun)
            now = clock.now()
            if now >= spun + SPIN_S or not (self._busy and self._on_host):
                watching = self._busy and not self._on_host and now < self._moved + WATCH_S
                # From here on the descriptors report; one is not armed if something came in meanwhile.
                asleep = not watching and self._arm()
        if not asleep and not watching:
            self.wakeup.set()
        now = clock.now()
        due = min([link.due() for link in [*self.links.values(), *self._ending]], default=math.inf)
        if watching:
            due = min(due, now + WATCH_EVERY_S)
        self.wakeup.at(None if due == math.inf else due)

    def shut_down(self) -> None:
        now = clock.now()
        for link in self.links.values():
            link.cut(TransportError("the transport was closed on this side"))
        self._ending += self.links.values()
        self.links.clear()
        for connection in self._connections.values():
            if connection is not None:
                connection.destroy()
        self._connections.clear()
        looks = 0
        while self._ending and (looks < LEAST or clock.now() < now + CLOSE_S):
            looks += 1
            self._step(clock.now())
            self._progress(clock.now() + SLICE_S)
        if self._ending:
            _log.warning("%s: UCX did not let go of %d links in %g s", self.agent, len(self._ending), CLOSE_S)
            _kept.extend([*self._ending, self._host, self._network])
        self._liveness.close()
        self._awake.clear()
        self._ending, self._host, self._network = [], None, None

    def _pieces(self, batch: Batch, merge: bool) -> tuple[Pieces, int]:
        """Where the runs lie that are not empty (with ``merge``, neighbours together), and their bytes in all."""
        only = self.memories.only(batch.local, batch.local_offsets, batch.lengths)
        if only is not None:
            return [only], only[1]
        addresses, lengths = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths), batch.lengths
        if not lengths.all():
            full = lengths > 0
            addresses, lengths = addresses[full], lengths[full]
        if merge and len(lengths) > 1:
            apart = addresses[1:] != addresses[:-1] + lengths[:-1]
            if not apart.all():
                first = np.concatenate(([0], np.flatnonzero(apart) + 1))
                addresses, lengths = addresses[first], np.add.reduceat(lengths, first)
        pieces = np.empty((len(lengths), 2), np.int64)
        pieces[:, 0], pieces[:, 1] = addresses, lengths
        return pieces, int(lengths.sum())

    def _progress(self, until: float) -> bool:
        """Let UCX work; whether it had anything to do."""
        moved = False
        for connection in self._awake:
            moved |= connection.progress(until)
        return moved

    def _arm(self) -> bool:
        """Leave all that have nothing to do to their descriptors; whether that is all of them."""
        self._awake = {connection for connection in self._awake if not connection.arm()}
        return not self._awake

    def _step(self, now: float) -> None:
        self._news.arrived = self._busy = self._unsettled = False
        for link in self.links.values():
            self._advance(link, now)
            self._busy |= link.busy
        for link in self._ending:
            self._advance(link, now)
        self._ending = [link for link in self._ending if not link.gone]

    def _advance(self, link: Link, now: float) -> None:
        chosen = link.connection
        link.step(now)
        if link.gone:
            return
        connection = link.connection
        if connection is not None and connection is not chosen:
            self.wakeup.add(connection.epoll, connection)
            self._uninherited.soon()
        if link.parted and link.liveness is not None:
            # Once the farewell is on its way, or cannot be: the peer learns by this, then.
            self._liveness.hang_up(link.liveness)
        if link.quiet():
            if connection is not None:
                self.wakeup.remove(connection.epoll)
                self._awake.discard(connection)
            for number in link.drop():
                self.quieted(number)
            return
        self._unsettled |= link.broken is not None
        if connection is not None and (connection.messages.posted or link.broken is not None):
            connection.messages.posted = False
            self._awake.add(connection)


def _memory_kinds() -> frozenset[str]:
    return frozenset({"cpu", "cuda"} if cuda.devices() else {"cpu"})
