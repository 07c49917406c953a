"""`python -m tests.layers [--all] [LAYER...] [-- OPTIONS]`: the suite, each layer a run of pytest that loads what its tests need.

`make test` runs them in this order, two at a time: most wait for processes and for time as much as they compute. It ends at the first
that fails. `make test-all` has every case: also those marked ``slow``, which
measure, build, move or start much, and all cases of each function (`tests/selection.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parents[1]
WORKERS = int(os.environ.get("WORKERS", "2"))
LINT = "lint"
EXAMPLES = "150"
"""How many histories of a state machine `make test-all` tries; `make test` tries fewer."""


class Layer(NamedTuple):
    """Where its tests are, how many cases of a function `make test` runs, and how many run side by side for each worker."""

    paths: str
    first: str = ""  # the modules that take longest, longest first: begun last, one of them would keep a single core
    keep: int = 8
    beside: float = 1  # more where tests wait more than they compute; 0: all in one process
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
    # It takes longest, in one process, and waits for its servers half of the time.
    "servers": Layer("tests/e2e", keep=0, beside=0),
    "core": Layer(
        "tests/schedule tests/protocol tests/geometry tests/memory tests/data tests/transport tests/engine",
        "tests/protocol/test_machines.py tests/memory/test_between.py tests/geometry/test_law.py "
        "tests/data/test_elastic.py tests/memory/test_checksum.py tests/schedule/test_machine.py tests/data/test_staging.py",
        beside=1.5,
    ),
    "house": Layer(
        f"{ROOT_FILES} tests/docs tests/testing tests/fuzz tests/examples",
        "tests/test_doctor.py tests/test_cli.py tests/test_incidents.py tests/test_packaging.py "
        "tests/test_why.py tests/test_keys.py tests/examples/test_transformers.py",
        keep=4,
        beside=2,
    ),
    "backends": Layer(
        "tests/backend tests/backends --ignore tests/backends/test_ucx.py",
        "tests/backends/test_impostors.py tests/backends/test_ports.py tests/backends/test_nixl_endings.py "
        "tests/backends/test_inheritance.py tests/backends/test_turns.py",
        keep=12,
        beside=2,
    ),
    "control": Layer(
        "tests/control",
        "tests/control/test_adversary.py tests/control/test_strangers.py tests/control/test_processes.py "
        "tests/control/test_dead_peers.py tests/control/test_budgets.py tests/control/test_endings.py",
        keep=4,
        beside=2,
    ),
    "vllm": Layer(
        "tests/vllm",
        "tests/vllm/test_seen.py tests/vllm/test_metrics.py tests/vllm/test_events.py tests/vllm/test_turns.py "
        "tests/vllm/test_conversations.py tests/vllm/test_kinds.py",
        keep=4,
    ),
    # The nixl and ucxx packages each bring a libucp, and with both in use in one process, UCX has crashed.
    "ucx": Layer("tests/backends/test_ucx.py", keep=12),
    # A process imports SGLang for as long as the tests take.
    "sglang": Layer("tests/sglang", keep=4, beside=0),
    "gpu": Layer("tests/gpu tests/backends/test_nixl.py tests/memory/test_between.py", needs="gpu"),
    "gpu-ucx": Layer("tests/backends/test_ucx.py", needs="gpu"),
    "gpus": Layer("tests/gpu --ignore tests/gpu/test_dead_peers.py", needs="gpus"),
    # It measures what is in use of a whole GPU.
    "gpus-alone": Layer("tests/gpu/test_dead_peers.py", beside=0, needs="gpus"),
}


def lint() -> int:
    """Print the lines of each area, and check form, types, prose and stated faults; return the status of the first that fails, or 0."""
    subprocess.run([sys.executable, "-m", "tests.areas"], cwd=ROOT, check=True)
    form = ["ruff", "format", "--check", "--quiet", "."], ["ruff", "check", "."]
    checks = (*form, ["tests.mutants", "--stale"], ["mypy"], ["tests.docs.lint"])
    return next(
        filter(None, (subprocess.run([sys.executable, "-m", *check], cwd=ROOT).returncode for check in checks)), 0
    )


def run(name: str, every: bool, options: Sequence[str], took: list[str], out: IO[bytes] | None = None) -> int:
    """Run a layer, or lint, with what it prints to `out`; append to `took` how long it took, and return its status."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.layers", LINT] if name == LINT else [*LAYERS[name].command(every), *options]
    # Each layer that runs beside another combines the coverage of its own processes alone.
    environment = {
        **os.environ,
        "KVXFER_LAYERS_TOOK": ", ".join(took),
        "COVERAGE_FILE": str(ROOT / f".coverage.{name}"),
    }
    if every:
        environment.setdefault("KVXFER_EXAMPLES", EXAMPLES)
    status = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=out).returncode
    took.append(f"{name} {time.monotonic() - began:.0f}")
    return status


def run_two_at_a_time(names: Sequence[str], every: bool, options: Sequence[str], took: list[str]) -> int:
    """Run layers that need no GPU, and print each when it has ended, those that fail last.

    Returns:
        The status of the first that fails, or 0.
    """
    failed: list[tuple[int, str]] = []

    def run_one(name: str) -> None:
        if failed:
            return
        print(f"== {name} begins\n", end="", flush=True)  # in one piece
        with tempfile.TemporaryFile() as out:
            status = run(name, every, options, took, out)
            out.seek(0)
            text = f"== {name}\n{out.read().decode(errors='replace')}"
        if status:
            failed.append((status, text))
        else:
            print(text, flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_one, names))
    for _, text in failed:
        print(text, flush=True)
    return failed[0][0] if failed else 0


def main() -> int:
    """Run the layers that are named, or lint and all layers that need no GPU; end at the first that fails."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words, options = sys.argv[1:at], sys.argv[at + 1 :]
    every, names = "--all" in words, [word for word in words if word != "--all"]
    if names == [LINT]:
        return lint()
    names = names or [LINT, *(name for name, layer in LAYERS.items() if not layer.needs)]
    shared = [name for name in names if name == LINT or not LAYERS[name].needs]
    took: list[str] = []
    status = run_two_at_a_time(shared, every, options, took) if len(shared) > 1 else 0
    for name in names if len(shared) == 1 else [name for name in names if name not in shared]:
        if not status:
            print(f"== {name}", flush=True)
            status = run(name, every, options, took)
    if status:
        print(f"failed; seconds: {', '.join(took)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
