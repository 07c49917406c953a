"""Real vLLM servers under load, for ``kvxfer bench load``: whatever comes goes through their HTTP front ends."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from kvxfer.cli.terminal import Say
from kvxfer_bench.cpu import ENGINE, Spent, spent
from kvxfer_bench.load.phases import ALONE, LOADS, Arrival, Measure, OpenLoop, Phase, Side
from kvxfer_bench.options import STOCK, parsed
from kvxfer_bench.servers import START_S, shape_of, starting
from kvxfer_bench.vllm.engines import OTHERS_TOKENS, room, server_flags
from kvxfer_bench.vllm.kinds import Prompt, PromptCase, Prompts, first_tokens, offers
from kvxfer_bench.vllm.pairs import VllmPair, started
from kvxfer_bench.vllm.streams import busy, repeating
from kvxfer_vllm.demo.metrics import total
from kvxfer_vllm.demo.servers import Server, await_ready

AT_ONCE, THREADS = 16, 128
"""Loads and cached prompts that a server has room for at once, and that may wait for one."""
FILLERS = 2
"""Prompts that the prefill server has at any time, so that it never waits for one."""
CACHED = 4
"""Prompts of each length that the decode server has cached."""


class ServedPair:
    """Measures phases of a pair of servers; ``trace``: the file of the decode server's loads, if its connector is kvxfer's."""

    def __init__(self, pair: VllmPair, prompts: Prompts, others: int, trace: Path | None) -> None:
        self._pair, self._prompts, self._others, self._trace, self._read = pair, prompts, others, trace, 0

    def __call__(self, phase: str, arrivals: OpenLoop) -> Phase:
        """Measure a phase.

        Raises:
            ServerError: A server failed a request.
        """
        p, d = self._pair.prefill, self._pair.decode
        known = {n: [self._prompts.of(n) for _ in range(CACHED)] for n in arrivals.tokens if phase == LOADS}
        for some in known.values():
            first_tokens(d, some)
        with ExitStack() as stack:
            decoded: list[float] = []
            if phase != ALONE:
                decoded = stack.enter_context(busy(d, self._others, OTHERS_TOKENS))
                longest = max(arrivals.tokens)
                stack.enter_context(repeating(FILLERS, lambda ends: first_tokens(p, [self._prompts.of(longest)])))
            self._traces()
            before, begun = (_spent(p), _spent(d)), time.perf_counter()
            prefilled = total(p, "vllm:prompt_tokens_total")
            found = self._come(arrivals, known)
            ended = time.perf_counter()
            found.prefill.tokens = total(p, "vllm:prompt_tokens_total") - prefilled
            for side, was, server in zip((found.prefill, found.decode), before, (p, d), strict=True):
                side.seconds, (side.cpu, side.sleeps) = ended - begun, _spent(server).since(was)
                del side.cpu[ENGINE], side.sleeps[ENGINE]  # which go with the steps, of which there are not as many
            found.decode.tokens = sum(begun <= at <= ended for at in decoded)
        found.traces = self._traces()
        return found

    def _come(self, arrivals: OpenLoop, known: dict[int, list[Prompt]]) -> Phase:
        """Send what comes, and return once all of it has its first token."""
        begun, found, kept = time.perf_counter(), Phase(Side(), Side()), threading.Lock()

        def load(arrival: Arrival, prompt: Prompt) -> None:
            name = uuid.uuid4().hex
            told = offers(self._pair.prefill, [prompt], [name])
            sent = time.perf_counter()
            first = first_tokens(self._pair.decode, [prompt], told, [name]) - sent
            with kept:
                found.loaded.setdefault(arrival.tokens, []).append(first)

        def cached(arrival: Arrival, prompt: Prompt) -> None:
            sent = time.perf_counter()
            first = first_tokens(self._pair.decode, [prompt]) - sent
            with kept:
                found.cached.append(first)

        coming = [(one.at, load, one, self._prompts.of(one.tokens)) for one in arrivals.times()]
        if known:
            some = enumerate(arrivals.times())
            coming += [(one.at, cached, one, known[one.tokens][n % CACHED]) for n, one in some]
        with ThreadPoolExecutor(THREADS) as pool:
            sent: list[Future[None]] = []
            for at, send, one, prompt in sorted(coming, key=lambda each: each[0]):
                time.sleep(max(0.0, begun + at - time.perf_counter()))
                sent.append(pool.submit(send, one, prompt))
            time.sleep(max(0.0, begun + arrivals.seconds - time.perf_counter()))
            for future in sent:
                future.result()
        return found

    def _traces(self) -> list[dict[str, float]]:
        """Return what the trace has of loads since the last call."""
        if self._trace is None or not self._trace.exists():
            return []
        lines = self._trace.read_bytes()
        new, self._read = lines[self._read :], len(lines)
        told = [json.loads(line) for line in new.splitlines()]
        return [{"tokens": one["tokens"], "bytes": one["bytes"], **one["us"]} for one in told if one["failure"] is None]


def _spent(server: Server) -> Spent:
    return spent(server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True)))


@contextmanager
def served(
    backends: Sequence[str], model: str, gpus: str, tokens: Sequence[int], others: int, say: Say
) -> Iterator[dict[str, Measure]]:
    """Start a pair of servers for each back end, and yield what measures it.

    Raises:
        ConfigError: There is no such model.
    """
    shape, cases = shape_of(model), [PromptCase(n, AT_ONCE) for n in tokens]
    usual = server_flags(shape, cases, room(cases, others), others, bool(gpus))
    with starting(model, usual, gpus) as starter:
        measures: dict[str, Measure] = {}
        for number, text in enumerate(backends):
            name, settings = parsed(text, STOCK)
            trace = None if name in STOCK else starter.logs / f"trace-{number}.jsonl"
            told = text if trace is None else f"{name}:{json.dumps({**settings, 'trace': str(trace)})}"
            measures[text] = ServedPair(started(starter, told), Prompts(shape.vocab), others, trace)
        await_ready(starter.begun, START_S, lambda server: say(f"{server.name} answers"))
        yield measures
