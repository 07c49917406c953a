"""``UcxTransport``: the links and their workers, driven by ``poll``."""

from __future__ import annotations

import ctypes
import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup
from kvxfer_ucx import cuda
from kvxfer_ucx.connection import Connection
from kvxfer_ucx.library import load
from kvxfer_ucx.link import STREAMS, Half, Link, Offer
from kvxfer_ucx.messages import News, Pieces
from kvxfer_ucx.options import Options, make_context

__all__ = ["UcxTransport"]

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

CLOSE_S = 2.0
"""How long ``close`` waits for UCX to let go of everything."""

_kept: list[object] = []
"""What UCX does not let go of when a transport is closed: never driven again, nor destroyed while it is in use."""
# One reference more, so that the end of the process leaves to the system what is still in here.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))

_log = logging.getLogger("kvxfer.ucx")


class UcxTransport(Transport):
    """Moves bytes with UCX's tagged messages, through ucxx. ``Options`` says what ``options`` may hold.

    The data thread is the only one: ``fileno`` is readable when UCX has work, and ``poll`` does it.
    """

    name = "ucx"
    contract = 1
    inherits = frozenset({"listen"})
    guarded = "loopback"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self._options = Options.parse(options)
        self._library = load()
        self._thread = threading.get_ident()
        self._memories = Memories()
        self._offers: dict[bytes, tuple[Offer, Connection]] = {}
        self._links: dict[int, Link] = {}
        self._numbers = 0
        self._sealed = self._closed = False
        self._on_host = True  # all memory registered so far
        self._awake: set[Connection] = set()  # those that have to be driven; the descriptors of the others report
        self._ending: list[Link] = []
        self._ended: list[Completion] = []
        self._busy = False
        self._moved = 0.0  # when UCX last had anything to do
        # Whether something goes on of which ``News`` does not tell.
        self._unsettled = False
        self._news = News()
        self._kinds = _memory_kinds()
        self._context = make_context(self._library, self._options)
        self._wakeup = Wakeup()

    @classmethod
    def probe(cls) -> Probe:
        try:
            library = load()
            context = make_context(
                library, Options(listen="0.0.0.0")
            )  # what this host would allow; a context opens no port
        except KvxferError as e:
            return Probe(False, str(e))
        # One line a resource, "... -- transport/device".
        found = sorted({line.split(" -- ")[1] for line in context.info.splitlines() if " -- " in line})
        kinds = sorted({f.split("/")[0] for f in found})
        rdma = [k for k in kinds if k.startswith(("rc_", "dc_", "ud_"))]
        facts = {
            **library.versions,
            "transports": ", ".join(found),
            "rdma": ", ".join(rdma) or "none; the UCX of the wheels is built without InfiniBand and RoCE",
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
            run_bytes=HOST_RUN_BYTES if self._plain() else DEVICE_RUN_BYTES,
            abort="peer",
            quiet="backend_reset",
        )

    def register(self, regions: Sequence[Region]) -> int:
        self._check()
        if self._sealed:
            raise TransportError("all memory must be registered before the first endpoint is made")
        memory = self._memories.add(regions, self._kinds)
        self._on_host = self._plain()
        for device in {r.device for r in regions if r.device != "cpu"}:
            cuda.use(int(device.partition(":")[2] or 0))
        return memory

    def deregister(self, memory: int) -> None:
        self._check()
        for link in [*self._links.values(), *self._ending]:
            if any(h.memory == memory for h in link.halves()):
                raise TransportError(
                    f"memory {memory} is in use by a batch with {link.theirs.agent!r}; abort that first"
                )
        self._memories.remove(memory)

    def endpoint(self) -> bytes:
        self._check()
        self._sealed = True
        connection = Connection(self._library, self._context, self._news)
        offer = Offer(self.agent, connection.address, secrets.randbits(64), self._plain())
        data = offer.encode()
        self._offers[data] = offer, connection
        return data

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check()
        their = Offer.decode(theirs)
        if mine not in self._offers:
            raise TransportError("the first argument of connect is not an unused endpoint of this transport")
        if mine == theirs:
            raise TransportError("the two endpoints are the same")
        own, connection = self._offers.pop(mine)
        self._wakeup.add(connection.epoll, connection)
        self._numbers += 1
        self._links[self._numbers] = Link(connection, own, their, time.monotonic(), self._options.connect_timeout_s)
        self._wakeup.set()
        return self._numbers

    def withdraw(self, endpoint: bytes) -> None:
        self._check()
        _, connection = self._offers.pop(endpoint, (None, None))
        if connection is not None:
            connection.destroy()  # it never was connected to anybody

    def disconnect(self, peer: int) -> None:
        self._check()
        link = self._links.pop(peer, None)
        if link is not None:
            link.fail(TransportError("the link was closed on this side"), time.monotonic())
            self._ending.append(link)
            self._wakeup.set()

    def lost(self, peer: int) -> str | None:
        link = self._links.get(peer)
        return None if link is None or link.cause is None else str(link.cause)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._check()
        if batch.verb not in (Verb.SEND, Verb.RECV):
            raise TransportError(f"back end 'ucx' has no {batch.verb}; it has send and recv")
        link = self._links.get(batch.peer)
        if link is None:
            raise TransportError(f"there is no link {batch.peer}; it was never made or is disconnected")
        if not 0 <= batch.stream < STREAMS:
            raise TransportError(f"stream number {batch.stream} is not in [0, {STREAMS})")
        if any((h.verb, h.stream) == (batch.verb, batch.stream) for h in link.halves()):
            raise TransportError(f"{batch.verb} {batch.stream} is in flight on link {batch.peer} already")
        pieces, nbytes = self._pieces(batch, merge=link.plain)
        self._numbers += 1
        self._ended += link.submit(Half(self._numbers, batch.verb, batch.local, batch.stream, pieces, nbytes, after))
        self._wakeup.set()
        return self._numbers

    def poll(self) -> list[Completion]:
        self._check()
        self._awake.update(self._wakeup.clear())  # type: ignore[arg-type]
        start = time.monotonic()
        self._step(start)
        now = spun = time.monotonic()
        asleep = watching = False
        while not (asleep or watching or self._ended) and now < start + SLICE_S:
            if self._progress(start + SLICE_S):
                self._moved = spun = time.monotonic()
                if self._news.here or self._unsettled:
                    self._step(spun)
            now = time.monotonic()
            if now >= spun + SPIN_S or not (self._busy and self._on_host):
                watching = self._busy and not self._on_host and now < self._moved + WATCH_S
                # From here on the descriptors report; one is not armed if something came in meanwhile.
                asleep = not watching and self._arm()
        if not asleep and not watching:
            self._wakeup.set()
        now = time.monotonic()
        due = self._due(now)
        self._wakeup.at(min(due or math.inf, now + WATCH_EVERY_S) if watching else due)
        ended, self._ended = self._ended, []
        return ended

    def abort(self, batch: int) -> None:
        self._check()
        for link in self._links.values():
            if any(h.number == batch for h in link.halves()):
                why = f"batch {batch} was aborted on this side, which ends the link: UCX cannot take back a message"
                link.fail(TransportError(why), time.monotonic())
                self._wakeup.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        now = time.monotonic()
        for link in self._links.values():
            link.fail(TransportError("the transport was closed on this side"), now)
        self._ending += self._links.values()
        self._links = {}
        for _, connection in self._offers.values():
            connection.destroy()
        self._offers.clear()
        while self._ending and time.monotonic() < now + CLOSE_S:
            self._step(time.monotonic())
            self._progress(time.monotonic() + SLICE_S)
        if self._ending:
            _log.warning("%s: UCX did not let go of %d links in %g s", self.agent, len(self._ending), CLOSE_S)
            _kept.extend([*self._ending, self._context])
        self._wakeup.close()
        self._awake.clear()
        self._ending, self._context = [], None

    def fileno(self) -> int | None:
        return self._wakeup.fileno()

    def _check(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.agent!r} is closed")
        if threading.get_ident() != self._thread:
            raise TransportError(f"the transport of {self.agent!r} belongs to the thread that made it")

    def _pieces(self, batch: Batch, merge: bool) -> tuple[Pieces, int]:
        """Where the runs lie that are not empty (with ``merge``, neighbours together), and their bytes in all."""
        only = self._memories.only(batch.local, batch.local_offsets, batch.lengths)
        if only is not None:
            return [only], only[1]
        addresses, lengths = self._memories.addresses(batch.local, batch.local_offsets, batch.lengths), batch.lengths
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

    def _plain(self) -> bool:
        return all(r.device == "cpu" for m in self._memories for r in self._memories.regions(m))

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
        self._news.here = self._busy = self._unsettled = False
        for link in self._links.values():
            self._advance(link, now)
            self._busy |= link.busy
        for link in self._ending:
            self._advance(link, now)
        self._ending = [link for link in self._ending if not link.gone]

    def _advance(self, link: Link, now: float) -> None:
        connection = link.connection
        self._ended += link.step(now)
        if link.gone:
            return
        if link.quiet():
            self._wakeup.remove(connection.epoll)
            self._awake.discard(connection)
            link.drop()
            return
        self._unsettled |= link.cause is not None
        if connection.messages.posted or link.cause is not None:
            connection.messages.posted = False
            self._awake.add(connection)

    def _due(self, now: float) -> float | None:
        due = min([link.due(now) for link in [*self._links.values(), *self._ending]], default=math.inf)
        return None if due == math.inf else due


def _memory_kinds() -> frozenset[str]:
    return frozenset({"cpu", "cuda"} if cuda.devices() else {"cpu"})
