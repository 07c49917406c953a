"""Servers that are stopped together end together. Played by processes that take their time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvxfer_vllm.demo import servers
from kvxfer_vllm.demo.servers import Server, ended_together


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
