"""Coverage-guided fuzzing: ``python -m tests.fuzz.guided decoder -runs=1000000`` (arguments after the first are libFuzzer's).

The harness is a module with ``one(data: bytes)`` and, if it wants to, ``begin()`` and ``SEEDS``, the inputs that a run
begins with, or ``PREFIXES`` of the frames that are taken else.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    with atheris.instrument_imports(include=["kvxfer.protocol", "kvxfer.control", "kvxfer.data", "kvxfer.geometry"]):
        harness = importlib.import_module(f"tests.fuzz.{sys.argv[1]}")
        from tests.fuzz.frames import FRAMES
    with tempfile.TemporaryDirectory() as corpus:
        prefixes = getattr(harness, "PREFIXES", [b""])
        for i, data in enumerate(getattr(harness, "SEEDS", [p + frame for p in prefixes for frame in FRAMES])):
            (Path(corpus) / str(i)).write_bytes(data)
        if hasattr(harness, "begin"):
            harness.begin()
        atheris.Setup([sys.argv[0], "-max_len=4096", "-timeout=10", *sys.argv[2:], corpus], harness.one)
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
