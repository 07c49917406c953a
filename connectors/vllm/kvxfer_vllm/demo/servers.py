"""Real vLLM OpenAI servers on loopback: start, wait until they answer, stop them with all their processes."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

MODEL_NAME = "tiny"
BLOCK = 32
"""Tokens a block; the CPU attention of vLLM needs a multiple of 32."""
GRACE_S = 5.0
"""How long a server that is stopped may take to end by itself."""
LONGEST = 6
"""How many times longer than usual servers may take to start while their logs grow, as on a busy machine."""
CHUNK = 256
"""Tokens that one step of a server prefills at most, so that a longer prompt takes several."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

# Small, and nothing compiled or captured: a start of seconds instead of minutes. With float32, greedy tokens
# do not depend on how a prompt was cut into steps, so that a difference is a difference in the cache. The
# share of GPU memory only has to pass a check, because the cache's size is given.
ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": CHUNK,
    "kv_cache_memory_bytes": 128 << 20,
    "gpu_memory_utilization": 0.2,
}
"""What each engine is started with."""
_FLAGS = ["--api-server-count", "1", "--disable-uvicorn-access-log"]
for _name, _value in ENGINE.items():
    _FLAGS += [f"--{_name.replace('_', '-')}", *([] if _value is True else [str(_value)])]

_RAISED = re.compile(r"^(?:\(.*?\) )?(?:ERROR \S+ \S+ \[\S+\] )?([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)
"""The last line of a traceback, as Python or vLLM's logger writes it."""


class ServerError(Exception):
    """A server did not start, ended by itself or failed a request; the message carries the end of its log."""


class NoAnswer(ServerError):
    """A server did not answer a request in time; the connection has been closed."""


class Server:
    """One vLLM server with all its processes, started by the constructor and ended by `stop`.

    Args:
        name: what messages call it; also the name of its log file.
        model: folder of the model.
        logs: folder for its log file.
        kv_transfer: what `--kv-transfer-config` says, or None for a server without a connector.
        flags: further command-line flags.
        env: further environment variables.
        port: where it listens; by default at a free one.
        host: the address that it listens at.
        before: what to put before its command, such as ``nsenter`` into a network where that address is.

    Attributes:
        program: the module that its interpreter runs.
        usual: the flags of every server of this kind.
        environment: environment variables of every server of this kind.
    """

    program = "vllm.entrypoints.openai.api_server"
    usual: Sequence[str] = ("--served-model-name", MODEL_NAME, *_FLAGS)
    environment: Mapping[str, str] = ENVIRONMENT

    def __init__(
        self,
        name: str,
        model: Path,
        logs: Path,
        kv_transfer: Mapping[str, Any] | None = None,
        flags: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        before: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        port = free_port() if port is None else port
        self.url = f"http://{host}:{port}"
        arguments = ["--host", host, "--port", str(port), "--model", str(model), *self.usual]
        if kv_transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(kv_transfer)]
        # Its processes meet at a port. One that the system handed out could be another program's by then.
        env = {"VLLM_PORT": str(free_port()), **os.environ, **self.environment, **(env or {})}
        self._process = self._begin(before, [*arguments, *flags], env)

    def _begin(self, before: Sequence[str], arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:  # its predecessor of the same name may have written to it
            return subprocess.Popen(
                [*before, sys.executable, "-m", self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                # A process group of its own, so that all of it can be ended together. No session of its own: Linux gives
                # each an equal share of the processors, and beside a server that spins another's threads wait for seconds.
                process_group=0,
            )

    def ready(self) -> bool:
        """Return whether it answers by now.

        Raises:
            ServerError: It has ended.
        """
        if self._process.poll() is not None:
            raise self.error(f"ended by itself with status {self._process.returncode}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                return True
        except OSError:
            return False

    def written(self) -> int:
        """Return how many bytes its log has; 0 before it has one."""
        return self.log.stat().st_size if self.log.exists() else 0

    def post(
        self, path: str, body: Mapping[str, Any], timeout: float = 60.0, headers: Mapping[str, str] | None = None
    ) -> Any:
        """POST JSON, return the JSON answer.

        Raises:
            ServerError: The status is not 200, or the connection fails.
            NoAnswer: `timeout` seconds are over.
        """
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise self.error(f"answered {error.code} to {path}: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                raise self.error(f"gave no answer to {path} within {timeout:g} s", NoAnswer) from None
            raise self.error(f"did not answer {path}: {error}") from None

    def metrics(self) -> str:
        """Return the server's page of Prometheus metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    @property
    def pid(self) -> int:
        """The number of its first process."""
        return self._process.pid

    def error(self, what: str, kind: type[ServerError] = ServerError) -> ServerError:
        log = self.log.read_text(errors="replace")
        first = _RAISED.search(log)  # what vLLM calls the root cause stands pages above the end
        cause = f"\n--- the first error in its log, {self.log.name}: {first[1]}" if first else ""
        tail = "\n".join(log.splitlines()[-20:])
        return kind(f"the {self.name} server {what}{cause}\n--- the end of its log:\n{tail}")

    def stop(self) -> None:
        """End all its processes, with a few seconds to do it by themselves. Idempotent."""
        _stop([self])

    def ask_to_stop(self) -> None:
        """Send SIGTERM to its first process alone, as a cluster manager does, and do not wait."""
        os.kill(self._process.pid, signal.SIGTERM)

    def ended(self, timeout: float) -> bool:
        """Whether its first process has ended, or does within ``timeout`` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End all its processes at once, as a failing machine would. Idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait(10)

    def pause(self) -> None:
        """Stop all its processes until `resume`: alive, and silent."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # the whole group has ended


def _stop(servers: Sequence[Server]) -> None:
    """Stop all side by side: those that are still starting take all of their grace."""
    for server in servers:
        server._signal(signal.SIGTERM)
    try:
        over = time.monotonic() + GRACE_S
        for server in servers:
            server.ended(max(0.0, over - time.monotonic()))
    finally:
        for server in servers:  # also what outlived a server that went in time
            server._signal(signal.SIGKILL)
        for server in servers:
            server.kill()


@contextmanager
def ended_together() -> Iterator[list[Server]]:
    """Yield a list. The servers that are in it when the block ends are stopped, all at the same time."""
    servers: list[Server] = []
    try:
        yield servers
    finally:
        _stop(servers)


@dataclass(frozen=True)
class Cluster:
    """A prefill and a decode server with a connector between them, and a plain one to compare with."""

    plain: Server
    prefill: Server
    decode: Server


@contextmanager
def running(
    model: Path,
    logs: Path,
    config: Mapping[str, Any],
    decode_config: Mapping[str, Any] | None = None,
    plain: Server | None = None,
    timeout: float = 300.0,
    on_ready: Callable[[Server], None] = lambda server: None,
    flags: Iterable[str] = (),
    kind: type[Server] = Server,
) -> Iterator[Cluster]:
    """Start the servers side by side, hand them out once all answer, and end them whatever happens.

    Args:
        model: folder of the model.
        logs: folder for the servers' log files.
        config: the connector's settings (`kv_connector_extra_config`) at the prefill server.
        decode_config: the same for the decode server; by default what the prefill server gets.
        plain: a plain server that runs already, to share it; it is left running.
        timeout: seconds without a word in their logs after which they are given up.
        on_ready: told about each server when it answers.
        flags: further command-line flags of each server.
        kind: what they are.

    Raises:
        ServerError: one of them ended or did not answer in time.
    """
    flags = list(flags)
    with ended_together() as begun:

        def start(name: str, kv_transfer: Mapping[str, Any] | None) -> Server:
            server = kind(name, model, logs, kv_transfer, flags)
            begun.append(server)
            return server

        cluster = Cluster(
            plain=plain or start("plain", None),
            prefill=start("prefill", connector("kv_producer", config)),
            decode=start("decode", connector("kv_consumer", decode_config or config)),
        )
        await_ready([cluster.plain, cluster.prefill, cluster.decode], timeout, on_ready)
        yield cluster


def connector(role: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `--kv-transfer-config` says to have a vLLM server use kvxfer."""
    return {
        "kv_connector": "KVXferConnector",
        "kv_connector_module_path": "kvxfer_vllm",
        "kv_role": role,
        "kv_connector_extra_config": dict(config),
    }


def await_ready(
    servers: Iterable[Server], timeout: float, on_ready: Callable[[Server], None] = lambda server: None
) -> None:
    """Return once all servers answer. While their logs grow, they are waited for, up to `LONGEST` times `timeout`.

    Raises:
        ServerError: One has ended; or none has written to its log for `timeout` seconds; or it takes too long.
    """
    waiting = list(servers)
    begun = moved = time.monotonic()
    written = 0
    while waiting:
        for server in waiting[:]:
            if server.ready():
                waiting.remove(server)
                on_ready(server)
        now, before, written = time.monotonic(), written, sum(server.written() for server in waiting)
        if written != before:
            moved = now
        if waiting and now > min(moved + timeout, begun + LONGEST * timeout):
            raise waiting[0].error(
                f"did not answer within {now - begun:.0f} s, and wrote nothing for {now - moved:.0f} s"
            )
        time.sleep(0.2)


def free_port() -> int:
    """Return a TCP port that is free.

    Below those that the system hands out by itself: a server binds it half a minute from now, and by then any other
    could have been taken.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM as ctrl-C within the block, so that servers that were started are ended too. Main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
