"""Played engines that the tests of this folder share: a prefill and a decode one of a rank each, and others on demand."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer_vllm.demo.servers import free_port
from tests.conftest import require
from tests.sglang.played import model_folder

require("sglang")

ROOT = Path(__file__).parents[2]
ANSWER_S, TURN_S = 120.0, 0.01
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
"""SGLang's states of a request, `KVPoll`."""


class Forks:
    """The process that has imported SGLang, of which each rank is a fork."""

    def __init__(self) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.sglang.played", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
        theirs.close()

    def rank(self, setup: dict[str, Any], environ: dict[str, str]) -> "Played":
        ours, theirs = socket.socketpair()
        told = json.dumps([setup, {"SGLANG_HOST_IP": "127.0.0.1", **environ}])
        socket.send_fds(self._asked, [told.encode()], [theirs.fileno()])
        theirs.close()
        return Played(ours)

    def close(self) -> None:
        self._asked.close()
        self._process.wait(30)


class Played:
    """A rank in a process of its own; its methods are those of the rank, with arguments by name."""

    def __init__(self, channel: socket.socket) -> None:
        channel.settimeout(ANSWER_S)
        self._calls, self._answers = channel.makefile("w"), channel.makefile("r")
        self._pid = self.answer()

    def answer(self) -> Any:
        line = self._answers.readline()
        assert line, "the rank has ended"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def tell(self, method: str, **arguments: Any) -> None:
        print(json.dumps([method, arguments]), file=self._calls, flush=True)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            self.tell(method, **arguments)
            return self.answer()

        return call

    def until(self, room: int, *states: int, timeout: float = 60.0) -> int:
        """Poll a request until it is in one of these states."""
        end = time.monotonic() + timeout
        while (state := self.poll(room=room)) not in states:
            assert time.monotonic() < end, f"room {room} is in state {state} still, not in {states}"
            time.sleep(TURN_S)
        return int(state)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


class PlayedRanks:
    """The ranks of a played engine; one call goes to all of them."""

    def __init__(self, ranks: list[Played]) -> None:
        self.ranks = ranks

    def __getattr__(self, method: str) -> Callable[..., list[Any]]:
        def call(**arguments: Any) -> list[Any]:
            for rank in self.ranks:
                rank.tell(method, **arguments)
            return [rank.answer() for rank in self.ranks]

        return call

    def until(self, room: int, *states: int, timeout: float = 60.0) -> list[int]:
        return [rank.until(room, *states, timeout=timeout) for rank in self.ranks]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., contextlib.AbstractContextManager[Any]]]:
    """Returns played engines: of these ranks each, as (prefill, decode); each may have pipeline stages."""
    forks = Forks()
    folder = tmp_path_factory.mktemp("sglang")
    model = model_folder(folder)
    count = itertools.count()

    @contextlib.contextmanager
    def pair(
        prefill: int = 1,
        decode: int = 1,
        stages: int = 1,
        decode_stages: int = 1,
        environ: dict[str, str] | None = None,
        settings: dict[str, dict[str, Any]] | None = None,
        **setup: Any,
    ) -> Iterator[tuple[PlayedRanks, PlayedRanks]]:
        port, n = free_port(), next(count)
        engines = []
        with contextlib.ExitStack() as stack:
            for role, tp, of in (("prefill", prefill, stages), ("decode", decode, decode_stages)):
                told = {
                    "role": role,
                    "tp": tp,
                    "stages": of,
                    "port": port,
                    "model": str(model),
                    "store": f"{folder}/{n}-{role}",
                    **setup,
                }
                env = {"KVXFER_SGLANG": json.dumps((settings or {}).get(role, {})), **(environ or {})}
                engines.append(PlayedRanks([forks.rank({**told, "rank": rank}, env) for rank in range(tp * of)]))
                for rank in engines[-1].ranks:
                    stack.callback(rank.kill)
            for engine in engines:
                for rank in engine.ranks:
                    rank.answer()  # that it is ready
            yield engines[0], engines[1]

    yield pair
    forks.close()


@pytest.fixture(scope="session")
def pair(start: Callable[..., Any]) -> Iterator[tuple[PlayedRanks, PlayedRanks]]:
    with start() as engines:
        yield engines


@pytest.fixture
def room() -> int:
    """A room that no other request has."""
    return int.from_bytes(os.urandom(6))
