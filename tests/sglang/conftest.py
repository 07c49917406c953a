"""Played engines that the tests of this folder share: a prefill and a decode one of a rank each, and others on demand."""

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.sglang.played import model_folder

require("sglang")

ROOT = Path(__file__).parents[2]
ANSWER_S, TURN_S = 120.0, 0.01
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
"""SGLang's states of a request, `KVPoll`."""


class Played:
    """A rank in a process of its own; its methods are those of the rank, with arguments by name."""

    def __init__(self, setup: dict[str, Any], environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.sglang.played", json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "SGLANG_HOST_IP": "127.0.0.1", **environ},
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def answer(self) -> Any:
        line = self._answers.get(timeout=ANSWER_S)
        assert line, f"the rank has ended with {self.process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def tell(self, method: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self.tell(method, **arguments)
            return self.answer()

        return call

    def until(self, room: int, *states: int, timeout: float = 20.0) -> int:
        """Poll a request until it is in one of these states."""
        end = time.monotonic() + timeout
        while (state := self.poll(room=room)) not in states:
            assert time.monotonic() < end, f"room {room} is in state {state} still, not in {states}"
            time.sleep(TURN_S)
        return int(state)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Engine:
    """The ranks of a played engine; one call goes to all of them."""

    def __init__(self, ranks: list[Played]) -> None:
        self.ranks = ranks

    def __getattr__(self, method: str) -> Callable[..., list[Any]]:
        def call(**arguments: Any) -> list[Any]:
            for rank in self.ranks:
                rank.tell(method, **arguments)
            return [rank.answer() for rank in self.ranks]

        return call

    def until(self, room: int, *states: int, timeout: float = 20.0) -> list[int]:
        return [rank.until(room, *states, timeout=timeout) for rank in self.ranks]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., contextlib.AbstractContextManager[Any]]]:
    """Returns played engines: of these ranks each, as (prefill, decode)."""
    folder = tmp_path_factory.mktemp("sglang")
    model = model_folder(folder)
    count = itertools.count()

    @contextlib.contextmanager
    def pair(
        prefill: int = 1,
        decode: int = 1,
        environ: dict[str, str] | None = None,
        settings: dict[str, dict[str, Any]] | None = None,
        **setup: Any,
    ) -> Iterator[tuple[Engine, Engine]]:
        port, n = free_port(), next(count)
        engines = []
        with contextlib.ExitStack() as stack:
            for role, tp in (("prefill", prefill), ("decode", decode)):
                told = {
                    "role": role,
                    "tp": tp,
                    "port": port,
                    "model": str(model),
                    "store": f"{folder}/{n}-{role}",
                    **setup,
                }
                env = {"KVXFER_SGLANG": json.dumps((settings or {}).get(role, {})), **(environ or {})}
                engines.append(Engine([Played({**told, "rank": rank}, env) for rank in range(tp)]))
                for rank in engines[-1].ranks:
                    stack.callback(rank.kill)
            for engine in engines:
                for rank in engine.ranks:
                    assert rank.answer() == "ready"
            yield engines[0], engines[1]

    yield pair


@pytest.fixture(scope="session")
def pair(start: Callable[..., Any]) -> Iterator[tuple[Engine, Engine]]:
    with start() as engines:
        yield engines


@pytest.fixture
def room() -> int:
    """A room that no other request has."""
    return int.from_bytes(os.urandom(6))
