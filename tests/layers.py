"""`python -m tests.layers [--all] [LAYER...] [-- OPTIONS]`: the suite, each layer a run of pytest that loads what its tests need.

`make test` runs them all, lint and servers beside the others, and ends at the first that fails. `make test-all` has every case: also those
marked ``slow``, which measure, build, move or start much, and all cases of each function (`tests/selection.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORKERS = int(os.environ.get("WORKERS", "2"))
EXAMPLES = "150"
"""How many histories of a state machine `make test-all` tries; `make test` tries fewer."""


class Layer(NamedTuple):
    """Where its tests are, how many cases of a function `make test` runs, and how many run side by side for each worker."""

    paths: str
    keep: int = 8
    beside: float = 1  # more where tests wait for other processes and for time more than they compute
    needs: str = ""  # the mark of its tests if they need GPUs; such a layer runs only if it is named

    def command(self, every: bool) -> list[str]:
        """Return what runs it, up to further options of pytest."""
        # What one class tests takes minutes on a GPU, so a class is spread; a module whose tests share servers is a group.
        count, dist = str(round(self.beside * WORKERS)), "loadgroup" if self.needs else "loadscope"
        workers = ["-n", count, "--dist", dist] if self.beside else []
        if self.needs:
            chosen = ["-m", f"{self.needs} and (slow or not slow)" if every else self.needs]
        else:
            chosen = [] if every else ["--keep", str(self.keep), "-m", "not slow"]
        return [sys.executable, "-m", "pytest", *self.paths.split(), *workers, *chosen]


ROOT_FILES = " ".join(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py")))
LAYERS = {
    "core": Layer(
        "tests/schedule tests/protocol tests/geometry tests/memory tests/data tests/transport tests/engine", beside=1.5
    ),
    "house": Layer(f"{ROOT_FILES} tests/docs tests/testing tests/fuzz tests/examples", keep=4, beside=2),
    "control": Layer("tests/control", keep=4, beside=2),
    "backends": Layer("tests/backend tests/backends --ignore tests/backends/test_ucx.py", keep=12, beside=2),
    # The nixl and ucxx packages each bring a libucp, and with both in use in one process, UCX has crashed.
    "ucx": Layer("tests/backends/test_ucx.py", keep=12),
    "vllm": Layer("tests/vllm", keep=4),
    "sglang": Layer("tests/sglang", keep=4),
    # Its servers keep all cores busy.
    "servers": Layer("tests/e2e", keep=0, beside=0),
    "gpu": Layer("tests/gpu tests/backends/test_nixl.py tests/memory/test_between.py", needs="gpu"),
    "gpu-ucx": Layer("tests/backends/test_ucx.py", needs="gpu"),
    "gpus": Layer("tests/gpu", needs="gpus"),
}


LINT = [
    "sh",
    "-ec",
    "\n".join(
        f"'{sys.executable}' -m {check}"
        for check in ("tests.areas", "ruff format --check --quiet .", "ruff check .", "mypy", "tests.docs.lint")
    ),
]
"""Prints the lines of each area, and checks form, types and prose."""


def run(name: str, every: bool, options: Sequence[str], took: list[str]) -> int:
    """Run a layer, and write down how long it took; return its status."""
    print(f"== {name}", flush=True)
    environment = {**os.environ, "KVXFER_LAYERS_TOOK": ", ".join(took)}
    if every:
        environment.setdefault("KVXFER_EXAMPLES", EXAMPLES)
    command = LINT if name == "lint" else [*LAYERS[name].command(every), *options]
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        _, waited, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(waited)
    took.append(f"{name} {time.monotonic() - began:.0f} ({used.ru_utime + used.ru_stime:.0f})")
    if process.returncode:
        print(f"{name} failed; seconds (of CPU): {', '.join(took)}", file=sys.stderr)
    return process.returncode


def run_all(every: bool, options: Sequence[str]) -> int:
    """Run all layers; return the status of the first that fails, or 0.

    Servers wait for programs that start, and types take one core: both run beside the other layers, and what they say is shown at the end.
    """
    took: list[str] = []
    with tempfile.TemporaryFile() as said:
        together = ["lint"] if every else ["lint", "servers"]  # slow tests measure, and want the machine for themselves
        words = [*together, *(["--all"] if every else []), "--", *options]
        command = [sys.executable, "-m", "tests.layers", *words]
        beside = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True)
        try:
            names = (name for name, layer in LAYERS.items() if not (layer.needs or name in together))
            status = next((failed for name in names if (failed := run(name, every, options, took) or beside.poll())), 0)
            print(f"== {', '.join(together)}, beside those: seconds (of CPU) {', '.join(took)}", flush=True)
            if not status:
                status = beside.wait()
        finally:
            if beside.poll() is None:
                os.killpg(beside.pid, signal.SIGINT)  # pytest stops its servers
                beside.wait()
        said.seek(0)
        print(said.read().decode(), flush=True)
    return status


def main() -> int:
    """Run the layers that are named, or all; return the status of the first that fails, or 0."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words, options = sys.argv[1:at], sys.argv[at + 1 :]
    every, names = "--all" in words, [word for word in words if word != "--all"]
    if not names:
        return run_all(every, options)
    took: list[str] = []
    return next((failed for name in names if (failed := run(name, every, options, took))), 0)


if __name__ == "__main__":
    sys.exit(main())
