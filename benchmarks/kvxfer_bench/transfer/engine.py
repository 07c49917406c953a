"""One side of a transfer benchmark, in a process of its own, driven by ``transfer.py``.

There are two figures. *Transport*: both data threads are given the same part; the time runs from when the later one starts on it to
the later end. *Session*: the producer has offered and the consumer fetches; the time runs from when the consumer hears of the offer
to the outcome. Rounds follow each other immediately, as under load.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
import numpy as np

from kvxfer.block_table import Ints
from kvxfer.config import Config, Integrity
from kvxfer.data.commands import Connect, Connected, EndpointMade, MakeEndpoint, SlotNews
from kvxfer.data.data_thread import DataThread
from kvxfer.data.part_ends import Limits
from kvxfer.data.policy import LinkPolicy, stager
from kvxfer.flag import Flag
from kvxfer.geometry import Cache, CopyPlan, Planner, ShardAssignment
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.parts import piece_bytes
from kvxfer.protocol.values import Move, Moved, PartRef, Role
from kvxfer.testing.engine import AgentEngine
from kvxfer.transport import Verb, load
from kvxfer_bench.agents import BASE, await_end, fetched, offered
from kvxfer_bench.transfer.shapes import Model, Pool

T, LINK = TransferId(BASE, 0), b"link"
SPIN_S, WAIT_S = 0.0002, 120.0


class Meeting:
    """One end of a pipe between the two sides."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._there = False

    def meet(self) -> None:
        """Wait until the other side is here as well.

        At first this spins, so that both begin at the same time; later it sleeps, so that the other side gets the
        processor.

        Raises:
            TimeoutError: The other side did not come within ``WAIT_S`` seconds.
        """
        self.pipe.send(None)
        until = time.monotonic() + SPIN_S
        while not self._there:
            if self.pipe.poll(0 if time.monotonic() < until else WAIT_S):
                self.hear()
            elif time.monotonic() > until + WAIT_S:
                raise TimeoutError("the other side did not come to the next round")
        self._there = False

    def tell(self, *words: int | None) -> None:
        """Send words to the other side."""
        self.pipe.send(words)

    def hear(self) -> Any:
        """Return the next words of the other side, or ``None`` if it has come for the next round."""
        words = self.pipe.recv()
        self._there |= words is None
        return words


@dataclass(frozen=True)
class Setup:
    """What a ``BenchEngine`` is made of."""

    role: Role
    backend: str
    options: dict[str, Any]
    model: Model
    blocks: int  # of the cache
    device: str  # of the cache
    staging_bytes: int | None  # None for an engine's default


class BenchEngine:
    """One of the two engines of a transfer benchmark. Its methods are called one after the other, on one thread."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pool = Pool(setup.model, setup.blocks, setup.device)
        if setup.role == "producer":
            self._pool.fill()
        self._config = Config(
            backend=setup.backend,
            backend_options=setup.options,
            transfer_timeout=WAIT_S,
            staging_bytes=setup.staging_bytes,
        )
        self._engines: dict[Integrity, AgentEngine] = {}
        self._data: DataThread | None = None
        self._rounds = 0

    # --- transport -------------------------------------------------------------------------------------------------

    def open_data_thread(self) -> bytes:
        """Start a data thread; return the endpoint for the other side."""
        backend = load(self._config.backend)
        self._results: deque[tuple[float, Any]] = deque()
        self._news = Flag()
        cache = self._pool.cache
        self._data = DataThread(
            self._config.backend,
            lambda: backend(self._setup.role, self._config.backend_options),
            cache.regions,
            stager(cache, self._config.staging_bytes),
            self._note,
            Limits(grace=5.0, quarantine=1 << 62),
        )
        self._policy = LinkPolicy.of(self._config.backend, *self._data.start(WAIT_S), cache)
        self._data.post(MakeEndpoint(LINK, 1, self._config.backend, self._setup.role))
        self._mine = bytes(self._take(EndpointMade).endpoint)
        return self._mine

    def connect(self, theirs: bytes) -> str:
        """Link this data thread to the other side's; return the mode in which parts are moved."""
        assert self._data is not None
        self._data.post(Connect(LINK, 1, self._mine, theirs))
        self._take(Connected)
        return self._policy.mode

    def move(self, src: Ints, dst: Ints, pipe: Connection, rounds: int) -> list[dict[str, float]]:
        """Move all the blocks ``rounds`` times; ``pipe`` leads to the other side.

        Returns:
            For each round its start and end, on a clock that all processes of a host share, and its bytes.
        """
        peer = Meeting(pipe)
        return [self._move(src, dst, peer) for _ in range(rounds)]

    def _move(self, src: Ints, dst: Ints, peer: Meeting) -> dict[str, float]:
        assert self._data is not None
        producer, mode = self._setup.role == "producer", self._policy.mode
        plan = self._plan(src, dst)
        info = _Info(self._policy.piece_bytes, self._policy.stage_below, self._planner)
        piece = piece_bytes(plan, info)  # type: ignore[arg-type]
        incoming = {"read": Verb.READ, "write": Verb.WRITE if piece else None, "sendrecv": Verb.RECV}[mode]
        outgoing = {"read": Verb.READ if piece else None, "write": Verb.WRITE, "sendrecv": Verb.SEND}[mode]
        verb = outgoing if producer else incoming
        begun = done = 0.0
        self._rounds += 1
        if incoming and outgoing:
            peer.meet()
        if verb is not None:
            ref = PartRef(self._setup.role, LINK, T, 1, self._rounds)
            self._data.post(Move(ref, verb, plan, self._rounds, piece))
            begun, done = self._until_moved(ref, peer)
        return {"begun": begun, "done": done, "bytes": plan.nbytes, "staged": float(bool(piece))}

    def _plan(self, src: Ints, dst: Ints) -> CopyPlan:
        return self._planner.plan((src,), (dst,), 0, len(src) * self._pool.cache.groups[0].block_tokens)

    def _note(self, result: Any) -> None:
        """On the data thread."""
        self._results.append((time.monotonic(), result))  # a clock that all processes of a host share
        self._news.set()

    def _until_moved(self, ref: PartRef, peer: Meeting) -> tuple[float, float]:
        """Pass messages about staged pieces between the two data threads until a part has moved; return its start and end."""
        assert self._data is not None
        while ready := wait([self._news.fileno(), peer.pipe], WAIT_S):
            if peer.pipe in ready and (words := peer.hear()) is not None:
                self._data.post(_news(ref, *words))
            for at, result in self._heard():
                match result:
                    case Moved(failure=None, seconds=seconds):
                        return at - seconds, at
                    case Moved(failure=why):
                        raise RuntimeError(f"the part ended with: {why}")
                    case SlotNews(said=m.SlotReady(piece=piece, offset=offset, nbytes=nbytes)):
                        peer.tell(piece, offset, nbytes)
                    case SlotNews(said=m.SlotFree(piece=piece)):
                        peer.tell(piece, None, None)
        raise TimeoutError("the part did not end")

    def _heard(self) -> Iterator[tuple[float, Any]]:
        """Yield the data thread's results, with their times."""
        self._news.clear()
        while self._results:
            yield self._results.popleft()

    def _take(self, kind: type) -> Any:
        wait([self._news.fileno()], WAIT_S)
        _, result = next(self._heard(), (0.0, None))
        error = getattr(result, "failure", None)
        if not isinstance(result, kind) or error:
            raise RuntimeError(f"expected {kind.__name__}, got {result}")
        return result

    # --- session ---------------------------------------------------------------------------------------------------

    def open_agent(self, integrity: Integrity) -> Source:
        """Start an agent whose transfers are checked in this way; there can be one agent for each way."""
        if self._data is not None:
            self._data.close(10.0)
            self._data = None
        config = msgspec.structs.replace(self._config, integrity=integrity)
        made = self._engines[integrity] = AgentEngine(config, name=self._setup.role, caches=(self._pool.cache,))
        return made.source

    def offer(self, numbers: Sequence[int], src: Ints) -> None:
        """Offer transfers on the agents of all ways of checking."""
        tokens = len(src) * self._setup.model.block_tokens
        for number in numbers:
            for made in self._engines.values():
                made.agents[0].offer(offered(number, src, tokens))

    def fetch(
        self, numbers: Sequence[int], dst: Ints, sources: dict[Integrity, Source]
    ) -> list[dict[Integrity, dict[str, float]]]:
        """Fetch transfers one after the other, each in all ways of checking.

        Returns:
            For each transfer and way: ``call_s``, the cost to the engine's thread; ``fetch_s``, the time to the outcome;
            and ``session_s``, the same without the wait for the producer's announcement.
        """
        return [{way: self._fetch(way, n, dst, source) for way, source in sources.items()} for n in numbers]

    def _fetch(self, integrity: Integrity, number: int, dst: Ints, source: Source) -> dict[str, float]:
        agent = self._engines[integrity].agents[0]
        spec = fetched(number, source, dst, len(dst) * self._setup.model.block_tokens)
        begun = time.perf_counter()
        agent.fetch(spec)
        called = time.perf_counter()
        event = await_end(agent, WAIT_S)
        return {
            "fetch_s": event.seconds,
            "session_s": event.seconds - event.waited,
            "call_s": called - begun,
            "bytes": event.nbytes,
        }

    # --- both ------------------------------------------------------------------------------------------------------

    def cache(self) -> Cache:
        return self._pool.cache

    def know(self, other: Cache) -> None:
        """Learn the other side's cache, before anything is moved.

        What depends only on the two caches is computed once, as on a link between agents.
        """
        cache = self._pool.cache
        source, sink = (cache, other) if self._setup.role == "producer" else (other, cache)
        view = cache.views[0]
        assignments = [ShardAssignment(0, 0, view.layers, 0, 1 if view.heads is None else view.heads.count)]
        self._planner = Planner(source, sink, assignments)

    def clear(self) -> None:
        """Set the cache to zero."""
        self._pool.clear()

    def matches(self, mine: Ints, theirs: Ints) -> bool:
        """Return whether our blocks ``mine`` hold what the producer's blocks ``theirs`` do."""
        return self._pool.matches(np.asarray(mine), np.asarray(theirs))

    def close(self) -> None:
        """End whatever was opened."""
        if self._data is not None:
            self._data.close(10.0)
        for made in self._engines.values():
            made.close()


@dataclass(frozen=True)
class _Info:
    piece_bytes: int
    stage_below: int
    planner: Planner


def _news(ref: PartRef, piece: int, offset: int | None, nbytes: int | None) -> SlotNews:
    of = ref[2:]
    return SlotNews(ref, m.SlotFree(*of, piece) if nbytes is None else m.SlotReady(*of, piece, offset, nbytes))
