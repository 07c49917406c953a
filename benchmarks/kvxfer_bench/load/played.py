"""Engines without a model: their steps compute Python and small torch operations, and wait for a device that is not there.

Everything of kvxfer is real, in the interpreter of the step: both sides of ``kvxfer.engine``, the agent and its threads. Each engine is a
process. What it computes in a step is an amount of work, not a time, so whatever takes the interpreter from it makes its step longer.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.engine import BlockPins, EngineQueue, PrefixPool, SchedulerSide, Ticket, Update, WorkerChannel, WorkerSide
from kvxfer.engine.stories import of_load
from kvxfer.errors import KvxferError
from kvxfer.identity import RequestId, TransferId
from kvxfer.schedule import Load
from kvxfer.testing.remote import Remote
from kvxfer.values import BlockTable
from kvxfer_bench.cpu import ENGINE, spent
from kvxfer_bench.load.phases import ALONE, LOADS, Arrival, Measure, OpenLoop, Phase, Side
from kvxfer_bench.transfer.shapes import Model, Pool

CHUNK = 8192
"""Tokens of prompts that a step of the prefill engine computes."""
MODEL = Model(8, 2, 256, 16)
ROOM = 1 << 16
"""Tokens of a cache."""
REST_S = 0.001
"""How long an engine without work sleeps after a step, as vLLM's does."""
CONTENT = b"content"

PREFILL_S, DECODE_S = (0.010, 0.090), (0.004, 0.008)
"""What a step takes: seconds of Python and small torch operations, then of the device."""


class Steps:
    """Computes steps, each of ``python_s`` seconds of Python and ``device_s`` of the device."""

    def __init__(self, python_s: float, device_s: float) -> None:
        import torch

        torch.set_num_threads(1)
        self._some, self._device_s = torch.zeros(256), device_s
        self._launches = round(200 * python_s / min(self._launch(200) for _ in range(50)))

    def _launch(self, launches: int) -> float:
        """Do what an engine does between two kernels, ``launches`` times; return the CPU seconds."""
        begun = time.thread_time()
        for number in range(launches):
            places = {row: row * number for row in range(64)}
            self._some.add_(len(places))
        return time.thread_time() - begun

    def compute(self) -> None:
        """Launch a step, and wait for it."""
        self._launch(self._launches)
        time.sleep(self._device_s)


class _LendingPool(PrefixPool):
    """Lends blocks for loads within a step."""

    def lend(self, blocks: int) -> list[int] | None:
        table: list[int] = []
        return table if self.grow(table, blocks * MODEL.block_tokens) else None


@dataclass(eq=False)
class _Job:
    """A request, which came ``at`` a time of the monotonic clock. ``here``: all but its last token is in its blocks."""

    name: str
    tokens: int
    at: float
    here: bool = True
    blocks: list[int] = field(default_factory=list)
    load: Load | None = None


class PlayedEngine:
    """What both engines have in common. All is called on one thread."""

    def __init__(self, name: str, settings: dict[str, Any], step_s: tuple[float, float], others: int) -> None:
        """Make it; ``others``: requests that run all the time while it is busy."""
        config, facts, blocks = Config.from_mapping(settings), {"model": "played"}, ROOM // MODEL.block_tokens
        self._steps, self._busy = Steps(*step_s), False
        self._memory, self._pool = Pool(MODEL, blocks, "cpu"), _LendingPool(blocks, MODEL.block_tokens)
        self._memory.fill()
        self._inbox: Connection | None = None
        self._jobs: dict[str, _Job] = {}
        self._held: dict[str, list[int]] = {}  # blocks of requests that are over, by request
        queue = EngineQueue(lambda: len(self._jobs) + self._busy * others, self._arriving)
        pins = BlockPins(blocks // 4, self._pool)
        self._side = SchedulerSide(config, name, self._memory.cache.groups, 1, facts, pins=pins, queue=queue)
        agent = Agent(self._memory.cache, config, name, facts)
        self._worker = WorkerSide(agent, copy=self._copy, channel=WorkerChannel)
        self._calls = 0.0  # CPU seconds of kvxfer's calls
        while not self._side.ready:
            self._step([])

    def _copy(self, src: BlockTable, dst: BlockTable) -> None:
        pages = self._memory.words.reshape(MODEL.layers, self._memory.blocks, -1)
        pages[:, dst.ids()] = pages[:, src.ids()]

    def _arriving(self) -> bool:
        return self._inbox is not None and self._inbox.poll()

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Count what kvxfer's calls cost this thread."""
        begun = time.thread_time()
        yield
        self._calls += time.thread_time() - begun

    @contextmanager
    def _phase(self, phase: str) -> Iterator[Side]:
        """Measure a phase; it lasts as long as the block."""
        self._busy, side = phase != ALONE, Side()
        before, calls, begun = spent(), self._calls, time.monotonic()
        yield side
        side.seconds, (side.cpu, side.sleeps) = time.monotonic() - begun, spent().since(before)
        side.cpu[ENGINE] = self._calls - calls

    def _step(self, running: list[_Job]) -> Update:
        """Compute a step, in which these requests run beside the others."""
        with self._ours():
            step = self._side.step()
            self._worker.begin(step)
            self._worker.load(step)
        if running or self._busy:
            self._steps.compute()
        elif not self._side.loads.wait_alone():
            time.sleep(REST_S)
        with self._ours():
            self._worker.after_forward(step)
            update = self._side.report(self._worker.collect())
        for name, failure in update.failed.items():
            raise KvxferError(f"load {name} has failed: {failure}")
        for name in update.free:
            self._pool.free(self._held.pop(name))
        return update

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.name]
        with self._ours():
            if self._side.finished(job.name, BlockTable.of([job.blocks]), complete=True):
                self._held[job.name] = job.blocks
                return
        self._pool.free(job.blocks)

    def close(self) -> None:
        self._worker.close()
        self._side.close()


class PlayedPrefill(PlayedEngine):
    """Computes prompts in chunks, and offers those that the other engine is to load."""

    def run(self, phase: str, arrivals: OpenLoop, decode: Connection) -> Side:
        """Compute prompts without a pause, unless alone; tell the decode engine of those that it is to load."""
        with self._phase(phase) as side:
            begun, coming = time.monotonic(), deque(arrivals.times())
            while time.monotonic() < begun + arrivals.seconds or self._jobs or self._held:
                while coming and begun + coming[0].at <= time.monotonic():
                    self._take_in(coming.popleft(), begun)
                running = self._admit()
                self._step(running)
                side.tokens += self._busy * CHUNK
                for job in running:
                    decode.send((job.name, job.tokens, self._side.ticket(job.name), time.monotonic()))
                    self._finish(job)
        decode.send(None)
        return side

    def _take_in(self, arrival: Arrival, begun: float) -> None:
        job = _Job(f"{arrival.name}", arrival.tokens, begun + arrival.at)
        self._jobs[job.name] = job
        with self._ours():
            transfer = TransferId.mint(self._side.source.epoch, job.name)
            assert self._side.offer(job.name, transfer, CONTENT, job.tokens, stops=True)

    def _admit(self) -> list[_Job]:
        """Return the requests whose prompts this chunk computes, each whole."""
        running, room = [], CHUNK
        for job in self._jobs.values():
            if job.tokens > room or not self._pool.grow(job.blocks, job.tokens):
                break
            running.append(job)
            room -= job.tokens
            with self._ours():
                self._side.runs(job.name, 0, job.tokens, BlockTable.of([job.blocks]))
        return running


class PlayedDecode(PlayedEngine):
    """Decodes, loads prompts, and computes others that are cached."""

    def __init__(self, name: str, settings: dict[str, Any], step_s: tuple[float, float], others: int) -> None:
        super().__init__(name, settings, step_s, others)
        self._others = others

    def run(self, phase: str, arrivals: OpenLoop, prefill: Connection) -> Phase:
        """Decode, unless alone; load what the prefill engine has computed. As many cached prompts come while others decode and loads come.

        The result has nothing of the prefill engine.
        """
        self._inbox, ends = prefill, False
        found = Phase(Side(), Side())
        with self._phase(phase) as found.decode:
            begun, coming = time.monotonic(), deque(arrivals.times() if phase == LOADS else ())
            while not ends or self._jobs or coming:
                while prefill.poll():
                    if (told := prefill.recv()) is None:
                        ends = True
                        break
                    self._take_in(*told)
                while coming and begun + coming[0].at <= time.monotonic():
                    cached = coming.popleft()
                    self._jobs[f"cached {cached.name}"] = _Job(
                        f"cached {cached.name}", cached.tokens, begun + cached.at
                    )
                running = [job for job in self._jobs.values() if job.here or self._admit(job)]
                update = self._step(running)
                found.decode.tokens += self._busy * self._others
                for name in update.loaded & self._jobs.keys():
                    self._jobs[name].here = True
                now = time.monotonic()
                for job in running:
                    firsts = found.cached if job.load is None else found.loaded.setdefault(job.tokens, [])
                    firsts.append(now - job.at)
                    self._finish(job)
                    if job.load is not None:
                        story = of_load(job.load)
                        us = {stage: 1e6 * at for stage, at in story.stages.items()}
                        found.traces.append({"tokens": job.tokens, "bytes": story.came, **us})
        return found

    def _take_in(self, name: str, tokens: int, ticket: Ticket, at: float) -> None:
        self._jobs[name] = _Job(name, tokens, at, here=False)
        with self._ours():
            assert self._side.load(name, ticket.transfer, ticket.digest, ticket.source, tokens - 1, offered=True)
            self._side.prefetch(name, 0)

    def _admit(self, job: _Job) -> bool:
        """Give a request its blocks once its tokens can come; return whether they are here."""
        if job.load is not None:
            return False
        with self._ours():
            tokens = self._side.loadable(job.name, 0)
            if tokens is None:
                return False
            if not tokens:
                raise KvxferError(f"load {job.name} has failed: {self._side.failure(job.name)}")
            assert self._pool.grow(job.blocks, job.tokens)
            self._side.allocated(job.name, BlockTable.of([job.blocks]), tokens)
            request = self._side.loads.schedule.requests.find(RequestId(job.name))
            job.load = None if request is None else request.own_load
            return self._side.is_prefetched(job.name)


@contextmanager
def played(settings: dict[str, Any], others: int) -> Iterator[Measure]:
    """Have two engines, and yield what measures a phase of theirs. ``others``: requests that decode while they are busy."""
    with (
        Remote("prefill engine", PlayedPrefill, "P", settings, PREFILL_S, 0) as p,
        Remote("decode engine", PlayedDecode, "D", settings, DECODE_S, others) as d,
    ):

        def measure(phase: str, arrivals: OpenLoop) -> Phase:
            ours, theirs = mp.get_context("spawn").Pipe()
            with ours, theirs:
                p.send("run", phase, arrivals, theirs)
                d.send("run", phase, arrivals, ours)
                side = p.get()
                found: Phase = d.get()
            found.prefill = side
            return found

        p.wait()
        d.wait()
        yield measure
