"""Puts each fault of `product.toml` into a copy of the tree, and shows which test finds it: `python -m tests.mutants [NAME...]`.

A fault must be found by what `make test` runs. One whose text is not in the tree any more is stale: state it for the code that took its
place. Run this before you delete or weaken tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

from tests.layers import LAYERS, ROOT, Layer

LIMIT_S = 1200
"""A run that takes longer hangs, which is a way to be found."""


def copy_tree(to: Path) -> None:
    """Copy all files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)


def environment(tree: Path) -> dict[str, str]:
    """Return the environment in which the copy's code is imported, and not the installed one."""
    siblings = sorted(str(found.parent) for found in tree.glob("*/pyproject.toml")) + sorted(
        str(found.parent) for found in tree.glob("*/*/pyproject.toml")
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *siblings]), "PYTHONDONTWRITEBYTECODE": "1"}


def layer_of(path: str) -> Layer:
    """Return the layer of which this file or folder is a part, cut down to it."""
    layer = next(layer for layer in LAYERS.values() if any(path.startswith(at) for at in layer.paths.split()))
    return layer._replace(paths=path, first="", beside=0)


def found_by(tests: str, tree: Path) -> str | None:
    """Run files and folders of tests on a tree, one after the other; return the first test that fails, or ``None``."""
    for layer in map(layer_of, tests.split()):
        command = [
            *layer.command(every=False),
            "-x",
            "-q",
            "--no-header",
            "--hypothesis-profile=first",
            "-p",
            "no:cacheprovider",
            "--tb=no",
        ]
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"a run of {layer.paths} that took more than {LIMIT_S} s"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", done.stdout, re.M)
        if failed:
            return failed[1]
        if done.returncode:
            raise RuntimeError(f"{layer.paths} cannot be run:\n{(done.stdout + done.stderr)[-2000:]}")
    return None


def main() -> int:
    """Try the faults of these names, or all; return how many are stale or survive."""
    mutants = tomllib.loads(Path(__file__).with_name("product.toml").read_text())
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kvxfer-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for name in sys.argv[1:] or mutants:
            mutant, began = mutants[name], time.monotonic()
            file = tree / mutant["file"]
            sound = file.read_text() if file.is_file() else ""
            if sound.count(mutant["text"]) != 1:
                result, by = "STALE", f"its text stands {sound.count(mutant['text'])} times in {mutant['file']}"
            else:
                file.write_text(sound.replace(mutant["text"], mutant["instead"]))
                found = found_by(mutant["tests"], tree)
                file.write_text(sound)
                result, by = ("SURVIVES", "-") if found is None else ("found", found)
            results[result] += 1
            print(f"{result:8} {name:52} {time.monotonic() - began:4.0f} s  {by}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in results.items()))
    return min(sum(results.values()) - results["found"], 1)


if __name__ == "__main__":
    sys.exit(main())
