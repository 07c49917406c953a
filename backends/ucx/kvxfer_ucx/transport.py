"""``UcxTransport``: the worker, its listener and its links, driven by ``poll``."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError, PeerError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup
from kvxfer_ucx import cuda
from kvxfer_ucx.connection import Connection
from kvxfer_ucx.library import load
from kvxfer_ucx.link import STREAMS, TAGS, TOKEN_BYTES, Half, Link, Offer
from kvxfer_ucx.listener import destroy
from kvxfer_ucx.messages import Messages, Pieces
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

_log = logging.getLogger("kvxfer.ucx")


class UcxTransport(Transport):
    """Moves bytes with UCX's tagged messages, through ucxx. ``Options`` says what ``options`` may hold.

    The data thread is the only one: ``fileno`` is readable when UCX has work, and ``poll`` does it.
    """

    name = "ucx"
    inherits = frozenset({"advertise"})

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self._options = Options.parse(options)
        self._library = load()
        self._thread = threading.get_ident()
        self._memories = Memories()
        self._offers: dict[bytes, Offer] = {}
        self._late: list[Any] = []  # endpoints of those who dialled after we closed
        self._links: dict[int, Link] = {}
        self._numbers = 0
        self._sealed = self._closed = False
        self._on_host = True  # all memory registered so far
        self._inbound: list[tuple[Connection, float]] = []
        self._closing: list[Connection] = []
        self._ending: list[Link] = []
        self._ended: list[Completion] = []
        self._busy = False
        self._moved = 0.0  # when UCX last had anything to do
        # Whether something goes on of which ``Messages.news`` does not tell.
        self._unsettled = False
        self._kinds = _memory_kinds()
        ucxx = self._library.ucxx
        self._context = make_context(self._library, self._options)
        try:
            self._worker = ucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            self._listener = ucxx.UCXListener.create(self._worker, self._options.port, self._on_request)
        except ucxx.UCXError as e:
            raise TransportError(f"UCX cannot listen on port {self._options.port or 'any'}: {e}") from e
        # In the order in which they must go: what is above stands on what is below.
        self._held: list[Any] = [self._listener, self._worker, self._context]
        self._messages = Messages(self._library.ucp, self._worker.handle)
        self._wakeup = Wakeup()
        self._wakeup.add(self._worker.epoll_file_descriptor, "ucx")

    @classmethod
    def probe(cls) -> Probe:
        try:
            library = load()
            context = make_context(library, Options())
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
                raise TransportError(f"memory {memory} is in use by a batch with {link.theirs}; abort that first")
        self._memories.remove(memory)

    def endpoint(self) -> bytes:
        self._check()
        self._sealed = True
        offer = Offer(
            self.agent, self._options.advertise, self._listener.port, secrets.token_bytes(TOKEN_BYTES),
            self._new_tag(), self._plain(),
        )  # fmt: skip
        self._offers[offer.token] = offer
        return offer.encode()

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check()
        own, their = Offer.decode(mine), Offer.decode(theirs)
        if own.token not in self._offers:
            raise TransportError("the first argument of connect is not an unused endpoint of this transport")
        if own.token == their.token:
            raise TransportError("the two endpoints are the same")
        del self._offers[own.token]
        now = time.monotonic()
        link = Link(self._messages, own, their, now, self._options.connect_timeout_s)
        self._numbers += 1
        self._links[self._numbers] = link
        if link.dials:
            self._dial(link, now)
        self._wakeup.set()
        return self._numbers

    def withdraw(self, endpoint: bytes) -> None:
        self._check()
        self._offers.pop(Offer.decode(endpoint).token, None)  # who has dialled for it is sent away at the next step

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
        self._wakeup.clear()
        start = time.monotonic()
        self._step(start)
        now = spun = time.monotonic()
        armed = watching = False
        while not (armed or watching or self._ended) and now < start + SLICE_S:
            if self._progress(start + SLICE_S):
                self._moved = spun = time.monotonic()
                if self._messages.news or self._unsettled:
                    self._step(spun)
            now = time.monotonic()
            if now >= spun + SPIN_S or not (self._busy and self._on_host):
                watching = self._busy and not self._on_host and now < self._moved + WATCH_S
                # From here on the descriptor reports; not armed if something came in meanwhile.
                armed = not watching and self._worker.arm()
        if not armed and not watching:
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
        for connection, _ in self._inbound:
            connection.close()
        self._ending += self._links.values()
        self._closing += [c for c, _ in self._inbound]
        self._links, self._inbound = {}, []
        while (self._ending or self._closing) and time.monotonic() < now + CLOSE_S:
            self._progress(time.monotonic() + SLICE_S)
            self._step(time.monotonic())
        if left := len(self._ending) + len(self._closing):
            _log.warning("%s: UCX did not let go of %d connections in %g s", self.agent, left, CLOSE_S)
        self._wakeup.close()
        self._ending, self._closing = [], []
        self._listener = self._worker = self._context = None
        destroy(self._held, self._late)

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

    def _new_tag(self) -> int:
        """Random bits for the tags of a link, apart from those of all others here."""
        others = [*self._offers.values(), *(link.mine for link in [*self._links.values(), *self._ending])]
        while True:
            tag = secrets.randbits(64)
            if all((tag ^ other.tag) >= TAGS for other in others):
                return tag

    def _dial(self, link: Link, now: float) -> None:
        ucxx, offer = self._library.ucxx, link.theirs
        try:
            endpoint = ucxx.UCXEndpoint.create(self._worker, offer.host, offer.port, True)
            link.dial(Connection(self._library, self._messages, endpoint))
        except ucxx.UCXError as e:
            link.fail(PeerError(f"{offer} cannot be dialled: {e}; is its address right?"), now)

    def _on_request(self, request: int) -> None:
        """Somebody connects. Called by UCX within progress."""
        ucxx = self._library.ucxx
        try:
            endpoint = self._held[0].create_endpoint_from_conn_request(request, True)
            if self._closed:
                self._late.append(endpoint)  # not to be closed within progress
                return
            connection = Connection(self._library, self._messages, endpoint)
            connection.expect(2 * TOKEN_BYTES)
        except ucxx.UCXError as e:
            _log.info("%s: a connection to our port came to nothing: %s", self.agent, e)
            return
        self._inbound.append((connection, time.monotonic() + self._options.connect_timeout_s))
        self._unsettled = True

    def _progress(self, until: float) -> bool:
        """Let UCX work until it has nothing more to do, or until then; whether it had anything to do."""
        progress, moved = self._worker.progress_once, False
        while progress():
            moved = True
            if time.monotonic() > until:
                break
        return moved

    def _step(self, now: float) -> None:
        self._messages.news = False
        if self._inbound:
            self._inbound = [(c, due) for c, due in self._inbound if not self._place(c, due, now)]
        self._busy = False
        for link in self._links.values():
            self._ended += link.step(now)
            self._busy |= link.busy
            link.gone()
        if self._ending:
            for link in self._ending:
                self._ended += link.step(now)
            self._ending = [link for link in self._ending if not link.gone()]
        if self._closing:
            self._closing = [c for c in self._closing if not c.closed()]
        self._unsettled = bool(self._inbound or self._ending or self._closing)

    def _place(self, connection: Connection, due: float, now: float) -> bool:
        """Give a connection that dialled us to its link; true when it is dealt with. Not before both sides have called
        ``connect``, whichever is first."""
        greeting = connection.greeting()
        if greeting is not None:
            token, their_token = greeting[:TOKEN_BYTES], greeting[TOKEN_BYTES:]
            for link in self._links.values():
                if link.mine.token == token and link.theirs.token == their_token and link.awaits:
                    link.accept(connection)
                    return True
            if token in self._offers and now < due and connection.trouble() is None:
                return False
            _log.warning("%s: a connection to our port showed no token of ours", self.agent)
        elif now < due and connection.trouble() is None:
            return False
        connection.close()
        self._closing.append(connection)
        return True

    def _due(self, now: float) -> float | None:
        dues = [due for _, due in self._inbound]
        dues += [link.due(now) for link in [*self._links.values(), *self._ending]]
        due = min(dues, default=math.inf)
        return None if due == math.inf else due


def _memory_kinds() -> frozenset[str]:
    return frozenset({"cpu", "cuda"} if cuda.devices() else {"cpu"})
