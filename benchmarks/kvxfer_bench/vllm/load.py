"""Clients that use a prefill and a decode side for a while, correctly and incorrectly, and how their requests ended.

Every request must end with the plain server's tokens or with an error, within `HANG_S`. Afterwards all servers must
answer correctly again and hold nothing of those requests.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.cli.progress import Say
from kvxfer_bench.vllm.resources import resources_of
from kvxfer_vllm.demo.metrics import total
from kvxfer_vllm.demo.prompts import OUTPUT_TOKENS, PROMPTS
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete, prefill_then_decode
from kvxfer_vllm.demo.servers import NoAnswer, Server, ServerError, await_ready, connector, ended_together, free_port

HANG_S = 90.0
"""A request without an answer by then counts as hung; this allows for the deadlines below, a pause, and two busy cores."""
SETTLE_S = 60.0
"""Time after the last request in which all blocks must be free again: a lease, and some more."""
SETTINGS = {"transfer_timeout": 10.0, "peer_timeout": 5.0, "lease": 20.0}
RSS_SLACK = 96 << 20
DESCRIPTORS_SLACK = 64


@dataclass
class Findings:
    """How the requests ended: counts by what the client did and how it ended, wrong answers, and missing ones. Any thread."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, act: str, end: str) -> None:
        with self._lock:
            self.counts[f"{act}: {end}"] += 1


class Stage:
    """Prefill servers and a decode server by name, any of which may be replaced while clients use them; all are added to ``begun``."""

    def __init__(
        self,
        model: Path,
        logs: Path,
        settings: Mapping[str, Any],
        prefills: int,
        flags: Iterable[str],
        begun: list[Server],
    ) -> None:
        self._begun = begun
        self._model, self._logs, self._flags = model, logs, list(flags)
        self._settings = {**SETTINGS, **settings}
        self.prefills = tuple(f"prefill-{n}" for n in range(prefills))
        self.names = (*self.prefills, "decode")
        self._ports = {name: free_port() for name in self.names}
        self._servers: dict[str, Server] = {}

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def start(self, name: str) -> Server:
        """Start a server, at the control address that its predecessor of this name had."""
        config = {**self._settings, "port": self._ports[name]}
        if name == "decode":
            kv_transfer = {**connector("kv_consumer", config), "kv_load_failure_policy": "recompute"}
        else:
            kv_transfer = connector("kv_producer", config)
        self._servers[name] = server = Server(name, self._model, self._logs, kv_transfer, self._flags)
        self._begun.append(server)
        return server


class Client(threading.Thread):
    """Sends requests one after another, correctly or not, until told to stop."""

    ACTS = (
        *["well"] * 4,
        "repeats params",
        "mixes params up",
        "withholds params",
        "leaves decode",
        "leaves after prefill",
    )

    def __init__(
        self, stage: Stage, expected: Mapping[str, list[int]], findings: Findings, seed: int, ends: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._stage, self._expected, self._findings, self._ends = stage, expected, findings, ends
        self._random = random.Random(seed)

    def run(self) -> None:
        while not self._ends.is_set():
            act = self._random.choice(self.ACTS)
            prompt, other = self._random.sample(sorted(self._expected), 2)
            try:
                self._findings.add(act, self._do(act, prompt, other))
            except NoAnswer as error:
                self._findings.hung.append(f"{act}: {error}")
            except ServerError:
                self._findings.add(act, "error")
                self._ends.wait(0.2)

    def _do(self, act: str, prompt: str, other: str) -> str:
        prefill, decode = self._stage[self._random.choice(self._stage.prefills)], self._stage["decode"]
        if act == "withholds params":
            return self._judge(act, prompt, complete(decode, prompt, OUTPUT_TOKENS, None, HANG_S).tokens)
        offer = complete(prefill, other if act == "mixes params up" else prompt, 1, PREFILL_PARAMS, HANG_S)
        if act == "leaves after prefill":
            return "left"
        if act == "leaves decode":
            patience = self._random.uniform(0.01, 0.5)
            try:
                tokens = complete(decode, prompt, OUTPUT_TOKENS, offer.kv_transfer_params, patience).tokens
            except NoAnswer:
                return "left"
            return self._judge(act, prompt, tokens)
        for _ in range(2 if act == "repeats params" else 1):
            tokens = complete(decode, prompt, OUTPUT_TOKENS, offer.kv_transfer_params, HANG_S).tokens
            end = self._judge(act, prompt, tokens)
        return end

    def _judge(self, act: str, prompt: str, tokens: list[int]) -> str:
        if tokens == self._expected[prompt]:
            return "right"
        self._findings.wrong.append(f"{act}: {len(prompt)} tokens beginning {prompt[:30]!r}")
        return "WRONG"


@contextmanager
def staged(
    model: Path,
    logs: Path,
    settings: Mapping[str, Any],
    prefills: int,
    say: Say,
    flags: Iterable[str] = (),
    prompts: Iterable[str] = PROMPTS.values(),
) -> Iterator[tuple[Stage, dict[str, list[int]]]]:
    """Return a stage with all its servers up and acquainted, and the tokens that a plain server makes of each prompt."""
    with ended_together() as begun:
        stage = Stage(model, logs, settings, prefills, flags, begun)
        plain = Server("plain", model, logs)
        begun.append(plain)
        await_ready([plain, *map(stage.start, stage.names)], 400, lambda server: say(f"{server.name} answers"))
        expected = {prompt: complete(plain, prompt, OUTPUT_TOKENS).tokens for prompt in prompts}
        plain.stop()
        for name in stage.prefills:
            prefill_then_decode(stage[name], stage["decode"], PROMPTS["several chunks"], OUTPUT_TOKENS)
        yield stage, expected


def under_load(
    stage: Stage,
    expected: Mapping[str, list[int]],
    clients: int,
    seed: int,
    meanwhile: Callable[[], None],
    warm_up: float = 0.0,
) -> dict[str, Any]:
    """Have `clients` send requests while `meanwhile` runs, then see what became of them and of the servers.

    What these hold after `warm_up` seconds of load is what they are measured by.

    Return `requests` by what the client did and how it ended, `resources` of each server before and after, and
    `objections`, which is empty if all went as promised.
    """
    findings, ends = Findings(), threading.Event()
    threads = [Client(stage, expected, findings, seed * 1000 + n, ends) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(warm_up)
        before = {name: (stage[name], resources_of(stage[name].pid)) for name in stage.names}
        meanwhile()
    finally:
        ends.set()
    for thread in threads:
        thread.join(2 * HANG_S)
    objections = [*(f"wrong tokens: {w}" for w in findings.wrong), *(f"hung: {h}" for h in findings.hung)]
    objections += [f"client {n} is still waiting" for n, thread in enumerate(threads) if thread.is_alive()]
    objections += _afterwards(stage, expected)
    resources = {}
    for name in stage.names:
        server, then = before[name]
        now = resources_of(stage[name].pid)
        resources[name] = {"before": then.as_dict(), "after": now.as_dict(), "same_process": server is stage[name]}
        if server is stage[name]:
            objections += [f"{name}: {o}" for o in now.growth(then, RSS_SLACK, DESCRIPTORS_SLACK)]
    return {"requests": dict(sorted(findings.counts.items())), "resources": resources, "objections": objections}


def _afterwards(stage: Stage, expected: Mapping[str, list[int]]) -> list[str]:
    """Return what is still wrong after the load: wrong answers, failed ones, blocks that are not free again."""
    found = []
    for prompt, tokens in expected.items():
        for name in stage.prefills:
            try:
                answer = prefill_then_decode(stage[name], stage["decode"], prompt, OUTPUT_TOKENS)
            except ServerError as error:
                found.append(f"afterwards, {name} or decode failed: {error}")
                continue
            if answer.tokens != tokens:
                found.append(f"afterwards, {name} and decode gave wrong tokens for a prompt of {len(prompt)} tokens")
    deadline = time.monotonic() + SETTLE_S
    for name in stage.names:
        while (used := total(stage[name], "vllm:kv_cache_usage_perc")) and time.monotonic() < deadline:
            time.sleep(0.5)
        if used:
            found.append(f"{name}: {used:.2%} of the KV cache is still in use {SETTLE_S:g} s after the last request")
    return found
