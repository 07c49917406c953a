"""Prefill, decode and plain SGLang servers without a GPU, and what tests ask of them."""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvxfer_bench.sglang.servers import GENERATE, SglangPair, SglangServer, ask_pair, generated, sampling, started_pair
from kvxfer_vllm.demo.servers import Server, await_ready, ended_together
from tests.e2e.forked import Forked
from tests.e2e.sglang_server import ENVIRONMENT, FLAGS

START_S, SETTLE_S = 240.0, 30.0
CHECKED = ("--disaggregation-enable-kv-checksum",)
"""SGLang itself then compares the KV of both servers, and fails a request whose KV differs."""
PATIENT = {"transfer_timeout": 60.0, "peer_timeout": 20.0, "lease": 10.0}


class CpuServer(Forked, SglangServer):
    """An SGLang server on SGLang's own CPU device."""

    program, preloaded = "tests.e2e.sglang_server", "tests.e2e.sglang_imported"
    usual = FLAGS
    environment = ENVIRONMENT
    begun_to_serve = 0
    """How long its log was when it was ready: before that SGLang may complain of its own start."""


@dataclass
class Stage:
    """Where servers are started.

    Attributes:
        model: Folder of their model.
        logs: Folder for their logs.
        begun: What was started; all of them are ended together.
        threads: For requests.
    """

    model: Path
    logs: Path
    begun: list[CpuServer]
    threads: ThreadPoolExecutor

    def plain(self, *flags: str) -> CpuServer:
        return self._start("plain", "", [*flags], {})

    def pair(
        self, *flags: str, name: str = "tcp", prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()
    ) -> SglangPair:
        """Start a pair with these flags; and with further ones of one server."""
        own = {"prefill": prefill, "decode": decode}
        return started_pair(
            name, lambda name, role, told, env: self._start(name, role, [*told, *own[role]], env), PATIENT, flags
        )

    def again(self, pair: SglangPair, role: str, *flags: str) -> SglangPair:
        """Start another server in the place of one of a pair."""
        common = ["--disaggregation-transfer-backend", "kvxfer", "--disaggregation-bootstrap-port", str(pair.bootstrap)]
        env = {"KVXFER_SGLANG": json.dumps({"backend": "tcp", **PATIENT})}
        server = self._start(f"again-{role}", role, ["--disaggregation-mode", role, *common, *flags], env)
        servers = {"prefill": pair.prefill, "decode": pair.decode, role: server}
        return SglangPair(servers["prefill"], servers["decode"], pair.bootstrap)

    def _start(self, name: str, role: str, flags: list[str], env: dict[str, str]) -> CpuServer:
        while (self.logs / f"{name}.log").exists():
            name += "-"
        server = CpuServer(name, self.model, self.logs, None, flags, env)
        self.begun.append(server)
        return server


@contextlib.contextmanager
def staged(model: Path, logs: Path) -> Iterator[Stage]:
    """Yield a stage; its servers are ended when the block ends."""
    with ended_together() as begun, ThreadPoolExecutor(32) as threads:
        try:
            yield Stage(model, logs, begun, threads)
        finally:
            for server in begun:  # SGLang takes its time to end
                server.kill()


def ready(*servers: CpuServer) -> None:
    await_ready(servers, START_S)
    for server in servers:
        server.begun_to_serve = server.written()


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(tokens)]


def expected(plain: Server, ids: list[int], tokens: int) -> list[int]:
    return generated(plain.post(GENERATE, sampling(ids, tokens), 120.0))


def serves(stage: Stage, pair: SglangPair, plain: Server, seed: int, tokens: int = 300) -> None:
    """Check that a pair answers as a plain server."""
    ids = prompt(seed, tokens)
    assert ask_pair(stage.threads, pair, ids, 8).tokens() == expected(plain, ids, 8)


def is_idle(server: Server, timeout: float = SETTLE_S) -> None:
    """Check that a server holds nothing of any request: SGLang empties its cache only then, and counts its pages itself."""
    end = time.monotonic() + timeout
    flush = urllib.request.Request(f"{server.url}/flush_cache", b"")
    while True:
        try:
            return urllib.request.urlopen(flush, timeout=20).close()
        except OSError:
            assert time.monotonic() < end, f"{server.name} is still busy: {server.log.read_text()[-2000:]}"
            time.sleep(0.5)


def complaints(server: CpuServer) -> list[str]:
    """Return the lines of a server's log that say that something went wrong within it since it was ready."""
    words = ("Traceback (most recent call last)", "checksum mismatch", "leak detected", "is a stub, and")
    log = server.log.read_bytes()[server.begun_to_serve :].decode(errors="replace")
    return [line for line in log.splitlines() if any(word in line for word in words)]
