"""How servers are waited for, and that those that are stopped together end together. Played by processes that take their time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import build
from kvxfer_vllm.demo import servers
from kvxfer_vllm.demo.servers import Server, ServerError, await_ready, ended_together


class Slow(Server):
    """Ends ``seconds`` after it was asked to, with status 3."""

    seconds = 1.0

    def _begin(self, before: Sequence[str], arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        end = f"lambda *_: (time.sleep({self.seconds}), os._exit(3))"
        code = f"import os, signal, time; signal.signal(signal.SIGTERM, {end}); print(flush=True); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0)
        assert process.stdout is not None
        process.stdout.readline()  # it knows by now what to do when it is asked to end
        process.stdout.close()
        return process


class Stubborn(Slow):
    seconds = 60.0


def test_each_has_its_grace_and_all_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "GRACE_S", 2.5)
    with pytest.raises(KeyboardInterrupt), ended_together() as begun:
        begun += [
            kind(f"{n}", tmp_path, tmp_path) for n, kind in enumerate([Stubborn, Slow, Stubborn, Slow, *[Stubborn] * 3])
        ]
        asked = time.monotonic()
        raise KeyboardInterrupt
    assert 2.5 <= time.monotonic() - asked < 10.0, "one after another would take five times the grace"
    assert [server._process.returncode for server in begun] == [-9, 3, -9, 3, -9, -9, -9]


class Starting(Slow):
    """Answers when its ``looks`` are used up, and writes to its log at each before or not."""

    seconds = 0.0

    def __init__(self, folder: Path, looks: int, writes: bool) -> None:
        super().__init__("starting", folder, folder)
        self.log.touch()
        self._looks, self._writes = looks, writes

    def ready(self) -> bool:
        with self.log.open("a") as log:
            log.write("goes on\n" * self._writes)
        self._looks -= 1
        return self._looks < 0


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    """The servers that are to be ended. A second is over whenever they have been looked at."""
    now = [0.0]

    def over(seconds: float) -> None:
        now[0] += 1.0

    with ended_together() as begun:
        with monkeypatch.context() as m:
            m.setattr(servers, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=over))
            yield begun


@pytest.mark.parametrize(("looks", "writes"), [(25, True), (4, False)])
def test_a_server_is_waited_for_while_its_log_grows(
    tmp_path: Path, played: list[Server], looks: int, writes: bool
) -> None:
    played.append(Starting(tmp_path, looks, writes))
    await_ready(played, 5.0)


@pytest.mark.parametrize(
    ("writes", "said"),
    [(True, "within 31 s, and wrote nothing for 0 s"), (False, "within 6 s, and wrote nothing for 6 s")],
)
def test_a_server_that_never_answers_is_given_up(tmp_path: Path, played: list[Server], writes: bool, said: str) -> None:
    played.append(Starting(tmp_path, 100, writes))
    with pytest.raises(ServerError, match=said):
        await_ready(played, 5.0)


def test_a_demo_that_gets_sigterm_ends_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Server] = []

    class Interrupted(Slow):
        seconds = 0.0

        def ready(self) -> bool:
            begun.append(self)
            if len(begun) == 3:
                signal.raise_signal(signal.SIGTERM)
            return False

    def unheard(*_: object) -> None:
        raise AssertionError("the demo does not hear it")

    monkeypatch.setattr(servers, "running", partial(servers.running, kind=Interrupted))
    before = signal.signal(signal.SIGTERM, unheard)
    try:
        result = CliRunner().invoke(build(), ["demo"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert [server._process.returncode for server in begun] == [3, 3, 3]
