"""A file is one idea, and can be read at a sitting: none has more than 400 lines."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 400

LONGER = {"kvxfer/protocol/consumer.py"}
"""Those that still have more. Whoever shortens one takes it out."""


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    files = [
        file
        for top in ("kvxfer", "backends", "connectors", "benchmarks", "testing")
        for file in (ROOT / top).rglob("*.py")
    ]
    longer = {str(f.relative_to(ROOT)) for f in files if len(f.read_text().splitlines()) > MAX_LINES}
    assert longer <= LONGER
