"""One side of a transfer benchmark, in a process of its own, driven by ``transfer.py``.

There are two figures. *Transport*: both data threads are given the same part; the time runs from when the later one starts on it to
the later end. *Session*: the producer has offered and the consumer fetches; the time runs from when the consumer hears of the offer
to the outcome. Rounds follow each other immediately, as under load, or each after a pause. On a shared machine, the caches of a core
that has been idle for milliseconds hold other processes' data, and what runs next takes several times as long.
"""

from __future__ import annotations

import threading
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
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.data.commands import Connect, Connected, EndpointMade, MakeEndpoint, SlotNews
from kvxfer.data.data_thread import DataThread
from kvxfer.data.part_ends import Limits
from kvxfer.data.policy import LinkPolicy, stager
from kvxfer.flag import Flag
from kvxfer.geometry import Cache, CopyPlan, Planner, ShardAssignment
from kvxfer.identity import FIRST, Handle, Source, TransferBase, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.parts import piece_bytes
from kvxfer.protocol.values import Ended, Move, Moved, PartRef, Released, Role
from kvxfer.transport import Verb, load
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_bench.transfer.shapes import Memory, Model, Pool

BASE = TransferBase("bench")
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
    memory: Memory = "plain"  # of the cache
    step_ms: float = 0.0  # of Python that a thread of the engine runs in each of its steps, with 1 ms of sleep between


class BenchEngine:
    """One of the two engines of a transfer benchmark. Its methods are called one after the other, on one thread."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pool = Pool(setup.model, setup.blocks, setup.device, setup.memory)
        if setup.role == "producer":
            self._pool.fill()
        self._config = Config(
            backend=setup.backend,
            backend_options=setup.options,
            transfer_timeout=WAIT_S,
            staging_bytes=setup.staging_bytes,
        )
        self._agents: dict[Integrity, tuple[Agent, Directory]] = {}
        self._data: DataThread | None = None
        self._rounds = 0
        if setup.step_ms:
            threading.Thread(target=self._make_steps, name="steps", daemon=True).start()

    def _make_steps(self) -> None:
        """Make empty steps, as vLLM's engine does while it waits for a load."""
        while True:
            until = time.perf_counter() + self._setup.step_ms / 1e3
            while time.perf_counter() < until:
                pass
            time.sleep(0.001)

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

    def move(self, src: Ints, dst: Ints, pipe: Connection, rounds: int, pause: float) -> list[dict[str, float]]:
        """Move all the blocks ``rounds`` times, pausing for ``pause`` seconds before each; ``pipe`` leads to the other side.

        Returns:
            For each round its start and end, on a clock that all processes of a host share, and its bytes.
        """
        peer = Meeting(pipe)
        return [self._move(src, dst, peer, pause) for _ in range(rounds)]

    def _move(self, src: Ints, dst: Ints, peer: Meeting, pause: float) -> dict[str, float]:
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
        time.sleep(pause)
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
        agent = Agent(self._pool.cache, config, self._setup.role)
        directory = Directory(Config(), self._setup.role, epoch=agent.epoch)
        self._agents[integrity] = agent, directory
        directory.publish((agent.descriptor,))
        return directory.source

    def offer(self, numbers: Sequence[int], src: Ints) -> None:
        """Offer transfers on the agents of all ways of checking."""
        tokens = len(src) * self._pool.cache.groups[0].block_tokens
        for number in numbers:
            for agent, _ in self._agents.values():
                agent.offer(Offer(TransferId(BASE, number), b"d", FIRST, tokens, BlockTable.of([src]), True))

    def fetch(
        self, numbers: Sequence[int], dst: Ints, sources: dict[Integrity, Source], pause: float
    ) -> list[dict[Integrity, dict[str, float]]]:
        """Fetch transfers one after the other, with a pause of ``pause`` seconds before each, and each in all ways of checking.

        Returns:
            For each transfer and way: ``call_s``, the cost to the engine's thread; ``fetch_s``, the time to the outcome;
            and ``session_s``, the same without the wait for the producer's announcement.
        """
        return [{way: self._fetch(way, n, dst, source, pause) for way, source in sources.items()} for n in numbers]

    def _fetch(self, integrity: Integrity, number: int, dst: Ints, source: Source, pause: float) -> dict[str, float]:
        agent, _ = self._agents[integrity]
        spec = self._spec(number, dst, source)
        time.sleep(pause)
        begun = time.perf_counter()
        agent.fetch(spec)
        called = time.perf_counter()
        [event] = _delivered(agent, 1)
        return {
            "fetch_s": event.seconds,
            "session_s": event.seconds - event.waited,
            "call_s": called - begun,
            "bytes": event.nbytes,
        }

    def fetch_at_once(self, numbers: Sequence[int], dsts: Sequence[Ints], source: Source) -> float:
        """Fetch unchecked transfers at once; return the seconds from before the first call to the last outcome."""
        agent, _ = self._agents["off"]
        specs = [self._spec(number, dst, source) for number, dst in zip(numbers, dsts, strict=True)]
        begun = time.perf_counter()
        for spec in specs:
            agent.fetch(spec)
        _delivered(agent, len(specs))
        return time.perf_counter() - begun

    def _spec(self, number: int, dst: Ints, source: Source) -> Fetch:
        tokens = len(dst) * self._pool.cache.groups[0].block_tokens
        return Fetch(Handle(str(number)), TransferId(BASE, number), b"d", source, BlockTable.of([dst]), 0, tokens)

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
        for agent, directory in self._agents.values():
            agent.close()
            directory.close()


def _delivered(agent: Agent, count: int) -> list[Ended]:
    """Return how ``count`` fetches ended, once their blocks are released.

    Raises:
        RuntimeError: One was not delivered.
        TimeoutError: They do not end.
    """
    until = time.perf_counter() + WAIT_S
    ended: list[Ended] = []
    released = 0
    while len(ended) < count or released < count:
        for event in agent.events():
            released += isinstance(event, Released)
            if isinstance(event, Ended):
                if not event.outcome.delivered:
                    raise RuntimeError(str(event.outcome))
                ended.append(event)
        if time.perf_counter() > until:
            raise TimeoutError("the fetch did not end")
        time.sleep(0.0001)
    return ended


@dataclass(frozen=True)
class _Info:
    piece_bytes: int
    stage_below: int
    planner: Planner


def _news(ref: PartRef, piece: int, offset: int | None, nbytes: int | None) -> SlotNews:
    of = ref[2:]
    return SlotNews(ref, m.SlotFree(*of, piece) if nbytes is None else m.SlotReady(*of, piece, offset, nbytes))
