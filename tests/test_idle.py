"""What an engine pays for kvxfer while nothing moves."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer import Agent, Cache, Config, Directory
from kvxfer.control.worker import Worker
from kvxfer.testing.engine import until

HEAVY = {"torch", "vllm", "asyncio", "email", "concurrent", "numba", "triton", "zmq", "numpy.typing"}


def test_public_names_load_nothing_heavy() -> None:
    program = "from kvxfer import *; from kvxfer.engine import *; import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert not HEAVY & set(loaded.stdout.split())


def test_an_idle_engine_s_threads_sleep() -> None:
    """The calmest of three seconds counts: on a busy host other tests' threads take the interpreter."""
    cache = Cache.of_tensors(np.zeros((2, 4, 16, 64), np.uint8), "layer block token unit")
    others = set(_wakeups())
    with Agent(cache, Config(backend="zmq"), "idle") as agent, Directory(Config(), "idle") as directory:
        directory.publish((agent.descriptor,))
        threading.Event().wait(0.5)
        rounds = []
        for _ in range(3):
            before = _wakeups()
            threading.Event().wait(1.0)
            rounds.append({one: n - before.get(one, 0) for one, n in _wakeups().items() if one not in others})
    names = {name for _, name in rounds[0]}
    assert {"kvxfer-control", "kvxfer-data", "kvxfer-dir"} <= names
    assert min(max(found.values()) for found in rounds) <= 3, rounds


def _wakeups() -> dict[tuple[int, str], int]:
    """Return how often each thread of this process but the calling one has woken up."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            with suppress(FileNotFoundError, ProcessLookupError):  # one that an earlier test has begun, which ends
                status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
                found[int(task.name), status["Name"]] = int(status["voluntary_ctxt_switches"])
    return found


def test_each_public_name_is_where_type_checkers_are_told() -> None:
    with open(kvxfer.__file__) as file:
        told = next(node for node in ast.parse(file.read()).body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in told.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == sorted(kvxfer.__all__)
    for name, home in homes.items():
        assert home is not None
        assert getattr(kvxfer, name) is getattr(sys.modules[home], name)
    assert set(kvxfer.__all__) <= set(dir(kvxfer))
    with pytest.raises(AttributeError, match="no attribute 'Agents'"):
        kvxfer.Agents  # noqa: B018


def test_threads_that_only_newcomers_need_end_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.control.worker.IDLE_S", 0.01)
    done, before = list[Any](), set(threading.enumerate())
    worker = Worker("kvxfer-examine", 4, done.append)
    for _ in range(2):  # another begins with the next job
        assert worker.submit(0, lambda: 1, lambda found: None)
        until(lambda: done and not set(threading.enumerate()) - before)
        done.clear()
    worker.close(1.0)
