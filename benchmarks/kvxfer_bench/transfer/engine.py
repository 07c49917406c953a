"""The two sides of a transfer benchmark, each in a process of its own, and what a round costs.

There are two figures. *Transport*: both data threads are given the same part; the time runs from when the later one starts on it to
the later end. *Session*: the producer has offered and the consumer fetches; the time runs from when the consumer hears of the offer
to the outcome. Rounds follow each other immediately, as under load.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
import numpy as np

from kvxfer.block_table import Ints
from kvxfer.config import Config, Integrity
from kvxfer.data.commands import Connect, Connected, EndpointMade, MakeEndpoint, SlotMessage, SlotNews
from kvxfer.data.data_thread import DataThread
from kvxfer.data.part_ends import Limits
from kvxfer.data.policy import LinkPolicy, stager
from kvxfer.errors import KvxferError
from kvxfer.flag import Flag
from kvxfer.geometry import Cache, Planner, ShardAssignment
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.parts import piece_bytes
from kvxfer.protocol.values import LinkInfo, Move, Moved, PartRef, Role
from kvxfer.testing.engine import AgentEngine
from kvxfer.testing.remote import Remote
from kvxfer.transport import Verb, load
from kvxfer_bench.agents import BASE, fetched, offered
from kvxfer_bench.transfer.shapes import Model, Pool

T, LINK = TransferId(BASE, 0), b"link"
SPIN_S, START_S, WAIT_S = 0.0002, 10.0, 120.0


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

    def hear(self) -> SlotMessage | None:
        """Return the next message of the other side, or ``None`` if it has come for the next round."""
        message: SlotMessage | None = self.pipe.recv()
        self._there |= message is None
        return message


class BenchEngine:
    """One of the two engines of a transfer benchmark. Its methods are called one after the other, on one thread.

    Args:
        role: Which.
        config: Its settings, but for the times that a transfer may take.
        model: The shape of its cache.
        blocks: The blocks of its cache.
        device: Where that is.
    """

    def __init__(self, role: Role, config: Config, model: Model, blocks: int, device: str) -> None:
        self._role, self._pool = role, Pool(model, blocks, device)
        if role == "producer":
            self._pool.fill()
        self._config = msgspec.structs.replace(config, start_timeout=START_S, transfer_timeout=WAIT_S)
        self._engines: dict[Integrity, AgentEngine] = {}
        self._data: DataThread | None = None
        self._rounds = 0

    # --- transport -------------------------------------------------------------------------------------------------

    def open_data_thread(self) -> tuple[bytes, Cache]:
        """Start a data thread; return the endpoint for the other side, and the cache."""
        backend = load(self._config.backend)
        self._results: deque[tuple[float, Any]] = deque()
        self._news = Flag()
        cache = self._pool.cache
        self._data = DataThread(
            self._config.backend,
            lambda: backend(self._role, self._config.backend_options),
            cache.regions,
            stager(cache, self._config.staging_bytes),
            self._note,
            Limits(grace=5.0, quarantine=1 << 62),
        )
        self._policy = LinkPolicy.of(self._config.backend, *self._data.start(WAIT_S), cache)
        self._data.post(MakeEndpoint(LINK, 1, self._config.backend, self._role))
        self._mine = bytes(self._take(EndpointMade).endpoint)
        return self._mine, cache

    def connect(self, theirs: bytes, other: Cache) -> str:
        """Link this data thread to the other side's; return the mode in which parts are moved.

        What depends only on the two caches is computed once, as on a link between agents.
        """
        assert self._data is not None
        cache = self._pool.cache
        source, sink = (cache, other) if self._role == "producer" else (other, cache)
        view = cache.views[0]
        assignments = [ShardAssignment(0, 0, view.layers, 0, 1 if view.heads is None else view.heads.count)]
        self._planner = Planner(source, sink, assignments)
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
        policy, mode = self._policy, self._policy.mode
        plan = self._planner.plan((src,), (dst,), 0, len(src) * self._pool.model.block_tokens)
        link = LinkInfo(mode, self._planner, piece_bytes=policy.piece_bytes, stage_below=policy.stage_below)
        piece = piece_bytes(plan, link)
        incoming = {"read": Verb.READ, "write": Verb.WRITE if piece else None, "sendrecv": Verb.RECV}[mode]
        outgoing = {"read": Verb.READ if piece else None, "write": Verb.WRITE, "sendrecv": Verb.SEND}[mode]
        verb = outgoing if self._role == "producer" else incoming
        begun = done = 0.0
        self._rounds += 1
        if incoming and outgoing:
            peer.meet()
        if verb is not None:
            ref = PartRef(self._role, LINK, T, 1, self._rounds)
            self._data.post(Move(ref, verb, plan, self._rounds, piece))
            begun, done = self._until_moved(ref, peer)
        return {"begun": begun, "done": done, "bytes": plan.nbytes, "staged": float(bool(piece))}

    def _note(self, result: Any) -> None:
        """On the data thread."""
        self._results.append((time.monotonic(), result))  # a clock that all processes of a host share
        self._news.set()

    def _until_moved(self, ref: PartRef, peer: Meeting) -> tuple[float, float]:
        """Pass messages about staged pieces between the two data threads until a part has moved; return its start and end."""
        assert self._data is not None
        while ready := wait([self._news.fileno(), peer.pipe], WAIT_S):
            if peer.pipe in ready and (message := peer.hear()) is not None:
                self._data.post(SlotNews(ref, message))
            for at, result in self._heard():
                match result:
                    case Moved(failure=None, seconds=seconds):
                        return at - seconds, at
                    case Moved(failure=why):
                        raise RuntimeError(f"the part ended with: {why}")
                    case SlotNews(said=message):
                        peer.pipe.send(message)
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
        made = self._engines[integrity] = AgentEngine(config, name=self._role, caches=(self._pool.cache,))
        return made.source

    def offer(self, numbers: Sequence[int], src: Ints) -> None:
        """Offer transfers on the agents of all ways of checking."""
        tokens = len(src) * self._pool.model.block_tokens
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
        engine = self._engines[integrity]
        spec = fetched(number, source, dst, len(dst) * self._pool.model.block_tokens)
        begun = time.perf_counter()
        engine.agents[0].fetch(spec)
        called = time.perf_counter()
        event = engine.over(spec.handle, self._config.longest + 2 * self._config.abort_timeout)
        if not event.outcome.delivered:
            raise KvxferError(f"a transfer was not delivered: {event.outcome}")
        return {
            "fetch_s": event.seconds,
            "session_s": event.seconds - event.waited,
            "call_s": called - begun,
            "bytes": event.nbytes,
        }

    # --- both ------------------------------------------------------------------------------------------------------

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


class Pair:
    """A producer and a consumer, each a ``BenchEngine`` in a process of its own.

    Times are in seconds, from when the later one began to when the later one was done.
    """

    def __init__(self, producer: Remote, consumer: Remote) -> None:
        self.producer, self.consumer = producer, consumer

    def connect(self) -> str:
        """Start a data thread on both sides and link them; return the mode in which parts are moved."""
        p, d = self.producer, self.consumer
        ends = p("open_data_thread"), d("open_data_thread")
        p.send("connect", *ends[1])
        d("connect", *ends[0])
        return str(p.get())

    def move(self, src: Ints, dst: Ints, rounds: int = 1) -> tuple[list[float], dict[str, Any]]:
        """Move the blocks with the back end.

        Returns:
            The time of each round, and what the producer reports about the last.
        """
        one, two = mp.get_context("spawn").Pipe()
        with one, two:
            self.producer.send("move", src, dst, one, rounds)
            self.consumer.send("move", src, dst, two, rounds)
            ours, theirs = self.answers()
        return [
            max(s["done"] for s in sides) - max(s["begun"] for s in sides) for sides in zip(ours, theirs, strict=True)
        ], ours[-1]

    def expect(self, dst: Ints, src: Ints, what: str) -> None:
        """Check that the consumer's blocks are the producer's.

        Raises:
            KvxferError: A byte differs.
        """
        if not self.consumer("matches", dst, src):
            raise KvxferError(f"the {what} run delivered wrong bytes")

    def answers(self) -> tuple[Any, Any]:
        """Return both answers.

        Raises:
            KvxferError: One has failed; if both have, it has both reasons.
        """
        try:
            ours = self.producer.get()
        except KvxferError as first:
            try:
                self.consumer.get()
            except KvxferError as second:
                raise KvxferError(f"{first}; {second}") from None
            raise
        return ours, self.consumer.get()


@contextmanager
def pair(config: Config, model: Model, blocks: int, where: tuple[str, str]) -> Iterator[Pair]:
    """Start two processes, each with a cache of ``blocks`` blocks, on the devices ``where``."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(Remote(role, BenchEngine, role, config, model, blocks, device))
            for role, device in zip(("producer", "consumer"), where, strict=True)
        ]
        yield Pair(*made)
