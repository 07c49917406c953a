"""Puts each fault of `product.toml` into a copy of the tree, and shows which test finds it: `python -m tests.mutants [NAME...]`.

A fault must be found by what `make test` runs. One whose text is not in the tree any more, or whose tests are not, is stale: state it for
the code that took its place. `make lint` names those (`--stale`). Run this before you delete or weaken tests.
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
from collections.abc import Mapping
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


def stale(mutant: Mapping[str, str], tree: Path) -> str:
    """Return why a fault cannot be put into a tree or found there; empty if it can."""
    file = tree / mutant["file"]
    count = file.read_text().count(mutant["text"]) if file.is_file() else 0
    if count != 1:
        return f"its text stands {count} times in {mutant['file']}"
    return "; ".join(f"there is no {path}" for path in mutant["tests"].split() if not (tree / path).exists())


def main() -> int:
    """Try the faults of these names, or all, or only look for stale ones; return whether any is stale or survives."""
    mutants = tomllib.loads(Path(__file__).with_name("product.toml").read_text())
    if sys.argv[1:] == ["--stale"]:
        found = {name: why for name, mutant in mutants.items() if (why := stale(mutant, ROOT))}
        print(*(f"STALE    {name}: {why}" for name, why in found.items()), sep="\n", end="\n" if found else "")
        return bool(found)
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kvxfer-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for name in sys.argv[1:] or mutants:
            mutant, began = mutants[name], time.monotonic()
            if why := stale(mutant, tree):
                result, by = "STALE", why
            else:
                file = tree / mutant["file"]
                sound = file.read_text()
                file.write_text(sound.replace(mutant["text"], mutant["instead"]))
                first = found_by(mutant["tests"], tree)
                file.write_text(sound)
                result, by = ("SURVIVES", "-") if first is None else ("found", first)
            results[result] += 1
            print(f"{result:8} {name:52} {time.monotonic() - began:4.0f} s  {by}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in results.items()))
    return min(sum(results.values()) - results["found"], 1)


if __name__ == "__main__":
    sys.exit(main())
