"""`python -m tests.layers [--all] [LAYER...] [-- OPTIONS]`: the suite, each layer a run of pytest that loads what its tests need.

`make test` runs them all in this order, and ends at the first that fails. `make test-all` has every case: also those marked ``slow``, which
measure, build, move or start much, and all cases of each function (`tests/selection.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORKERS = int(os.environ.get("WORKERS", "2"))
EXAMPLES = "150"
"""How many histories of a state machine `make test-all` tries; `make test` tries fewer."""


class Layer(NamedTuple):
    """Where its tests are, how many cases of a function `make test` runs, and how many run side by side for each worker."""

    paths: str
    first: str = ""  # the modules that take longest, longest first: begun last, one of them would keep a single core
    keep: int = 8
    beside: float = 1  # more where tests wait for other processes and for time more than they compute
    needs: str = ""  # the mark of its tests if they need GPUs; such a layer runs only if it is named

    def command(self, every: bool) -> list[str]:
        """Return what runs it, up to further options of pytest."""
        # What one class tests takes minutes on a GPU, so a class is spread; a module whose tests share servers is a group.
        count, dist = str(round(self.beside * WORKERS)), "loadgroup" if self.needs else "loadscope"
        workers = ["-n", count, "--dist", dist, "--no-loadscope-reorder"] if self.beside else []
        if self.needs:
            chosen = ["-m", f"{self.needs} and (slow or not slow)" if every else self.needs]
        else:
            chosen = [] if every else ["--keep", str(self.keep), "-m", "not slow"]
        return [sys.executable, "-m", "pytest", *self.paths.split(), *workers, "--first", self.first, *chosen]


ROOT_FILES = " ".join(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py")))
LAYERS = {
    "core": Layer(
        "tests/schedule tests/protocol tests/geometry tests/memory tests/data tests/transport tests/engine",
        "tests/protocol/test_machines.py tests/memory/test_between.py tests/data/test_slots.py tests/geometry/test_law.py "
        "tests/data/test_elastic.py tests/memory/test_checksum.py tests/schedule/test_machine.py tests/data/test_staging.py",
        beside=1.5,
    ),
    "house": Layer(
        f"{ROOT_FILES} tests/docs tests/testing tests/fuzz tests/examples",
        "tests/test_doctor.py tests/test_cli.py tests/test_incidents.py tests/test_played_incidents.py tests/test_packaging.py "
        "tests/test_why.py tests/test_keys.py",
        keep=4,
        beside=2,
    ),
    "control": Layer(
        "tests/control",
        "tests/control/test_adversary.py tests/control/test_processes.py tests/control/test_dead_peers.py "
        "tests/control/test_budgets.py tests/control/test_endings.py",
        keep=4,
        beside=2,
    ),
    "backends": Layer(
        "tests/backend tests/backends --ignore tests/backends/test_ucx.py",
        "tests/backends/test_impostors.py tests/backends/test_ports.py tests/backends/test_nixl_endings.py "
        "tests/backends/test_inheritance.py tests/backends/test_turns.py tests/backends/test_nixl_closing.py",
        keep=12,
        beside=2,
    ),
    # The nixl and ucxx packages each bring a libucp, and with both in use in one process, UCX has crashed.
    "ucx": Layer("tests/backends/test_ucx.py", keep=12),
    "vllm": Layer(
        "tests/vllm",
        "tests/vllm/test_metrics.py tests/vllm/test_turns.py tests/vllm/test_conversations.py tests/vllm/test_kinds.py",
        keep=4,
        beside=1.5,
    ),
    "sglang": Layer("tests/sglang", keep=4),
    # Its servers keep all cores busy.
    "servers": Layer("tests/e2e", keep=0, beside=0),
    "gpu": Layer("tests/gpu tests/backends/test_nixl.py tests/memory/test_between.py", needs="gpu"),
    "gpu-ucx": Layer("tests/backends/test_ucx.py", needs="gpu"),
    "gpus": Layer("tests/gpu --ignore tests/gpu/test_dead_peers.py", needs="gpus"),
    # It measures what is in use of a whole GPU.
    "gpus-alone": Layer("tests/gpu/test_dead_peers.py", beside=0, needs="gpus"),
}


def lint() -> int:
    """Print the lines of each area, and check form, types and prose; return the status of the first check that fails, or 0."""
    subprocess.run([sys.executable, "-m", "tests.areas"], cwd=ROOT, check=True)
    checks = (["ruff", "format", "--check", "--quiet", "."], ["ruff", "check", "."], ["mypy"], ["tests.docs.lint"])
    return next(
        filter(None, (subprocess.run([sys.executable, "-m", *check], cwd=ROOT).returncode for check in checks)), 0
    )


def run(names: Iterable[str], every: bool, options: Sequence[str], took: list[str]) -> int:
    """Run layers, and write down how long each took; return the status of the first that fails, or 0."""
    for name in names:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        if name == "lint":
            status = lint()
        else:
            environment = {**os.environ, "KVXFER_LAYERS_TOOK": ", ".join(took)}
            if every:
                environment.setdefault("KVXFER_EXAMPLES", EXAMPLES)
            status = subprocess.run([*LAYERS[name].command(every), *options], cwd=ROOT, env=environment).returncode
        took.append(f"{name} {time.monotonic() - began:.0f}")
        if status:
            print(f"{name} failed; seconds: {', '.join(took)}", file=sys.stderr)
            return status
    return 0


def main() -> int:
    """Run the layers that are named, or lint and all layers side by side."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words, options = sys.argv[1:at], sys.argv[at + 1 :]
    every, names = "--all" in words, [word for word in words if word != "--all"]
    took: list[str] = []
    if names:
        return run(names, every, options, took)
    with tempfile.TemporaryFile() as said:  # types take one core for a minute
        beside = subprocess.Popen([sys.executable, "-m", "tests.layers", "lint"], cwd=ROOT, stdout=said, stderr=said)
        first, *others = (name for name, layer in LAYERS.items() if not layer.needs)
        status = run([first], every, options, took)
        linted = beside.wait()
        said.seek(0)
        print(said.read().decode(), flush=True)
        return status or linted or run(others, every, options, took)


if __name__ == "__main__":
    sys.exit(main())
