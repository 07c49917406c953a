"""``kvxfer bench idle``: what kvxfer costs an engine while nothing moves: its import, and an idle agent's memory and CPU time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache

__all__ = ["idle", "measure_idle"]

IMPORT = """
import sys, time
begun = time.thread_time()
import numpy
before, numpys = set(sys.modules), time.thread_time()
import kvxfer
package = time.thread_time()
from kvxfer import *
from kvxfer.engine import *
print(numpys - begun, package - numpys, time.thread_time() - numpys)
print(*sorted(name for name in set(sys.modules) - before if "." not in name or name.startswith("numpy.")))
"""
IMPORTS = 5
"""Processes that import kvxfer. The fastest counts: the first compiles, others may wait for the disk or for each other."""
SETTLE_S = 0.5


def measure_idle(backend: str, seconds: float) -> dict[str, Any]:
    """Import kvxfer in processes of their own, then run an agent and a directory in this process with nothing to do.

    Returns:
        The CPU time, in ms, that the importing thread takes for numpy, then kvxfer, and then all public names. numpy's own threads
        wait in a loop for a while after its import, so the process's time would count them. Then the modules that these load, the
        private memory of agent and directory in MiB, the share of a core that they use in percent, and the wake-ups per second of
        each thread.
    """
    with tempfile.TemporaryDirectory() as compiled:  # compiled once, as an installed package is
        imports = [_import(compiled) for _ in range(IMPORTS)]
    numpys, package, names = (
        round(1e3 * min(times), 1) for times in zip(*(times for times, _ in imports), strict=True)
    )
    memory = np.zeros((2, 4, 16, 64), np.uint8)
    cache = Cache.of_tensors(memory, "layer block token unit")
    config = Config(backend=backend)
    before, others = _private(), set(_threads())
    with Agent(cache, config, "idle") as agent, Directory(config, "idle") as directory:
        directory.publish((agent.descriptor,))
        time.sleep(SETTLE_S)
        after, woken, spent = _private(), _threads(), time.process_time()
        time.sleep(seconds)
        spent = time.process_time() - spent
        ours = {tid: (name, woke) for tid, (name, woke) in _threads().items() if tid not in others}
    return {
        "backend": backend,
        "numpy_ms": numpys,
        "import_ms": package,
        "names_ms": names,
        "imports": imports[0][1],
        "agent_MiB": round((after - before) / 2**20, 1),
        "core_percent": round(100 * spent / seconds, 3),
        "wakeups_per_s": {
            name: round((woke - woken.get(tid, (name, 0))[1]) / seconds, 1) for tid, (name, woke) in ours.items()
        },
    }


def _import(compiled: str) -> tuple[list[float], list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    said = subprocess.run(
        [sys.executable, "-c", IMPORT],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment | {"PYTHONPYCACHEPREFIX": compiled},
    )
    seconds, modules = said.stdout.splitlines()
    return [float(each) for each in seconds.split()], modules.split()


def _private() -> int:
    """Return the bytes of this process's private memory."""
    kib = sum(
        int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Private_")
    )
    return kib << 10


def _threads() -> dict[int, tuple[str, int]]:
    """Return the name and the wake-ups of each thread of this process except the calling one."""
    me, found = threading.get_native_id(), {}
    for tid in map(int, os.listdir("/proc/self/task")):
        if tid != me:
            task = Path(f"/proc/self/task/{tid}")
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
            found[tid] = status["Name"], int(status["voluntary_ctxt_switches"])
    return found


def idle(
    backend: Annotated[str, typer.Argument(help="Back end to measure.")] = "tcp",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to stay idle, in seconds.")] = 60.0,
) -> None:
    """Measure what kvxfer costs an engine while nothing moves: import time, memory and CPU time.

    Prints one JSON object.
    """
    typer.echo(json.dumps(measure_idle(backend, seconds)))
