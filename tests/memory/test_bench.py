"""``kvxfer bench pack``: that it compares what was moved, and fails if it differs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvxfer.cli.bench import bench
from tests.conftest import require


@pytest.mark.parametrize("spoilt", [False, True])
def test_it_fails_if_bytes_differ(spoilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had said so, and passed."""
    require("torch")
    from kvxfer.memory.cpu import CpuSpace
    from kvxfer_bench import packing

    monkeypatch.setattr(packing, "PAIRS", packing.PAIRS[:2])
    unpack, calls = CpuSpace.unpack, []

    def spoils(space: CpuSpace, *arguments: object) -> object:
        fence = unpack(space, *arguments)  # type: ignore[arg-type]
        calls.append(space)
        if spoilt and space is calls[0]:
            space.memory(0)[:] ^= 1
        return fence

    monkeypatch.setattr(CpuSpace, "unpack", spoils)
    done = CliRunner().invoke(bench, ["pack", "--mib", "4", "--repeat", "1", "--json"])
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["bytes_identical"] for row in found] == [not spoilt, True]
    assert done.exit_code == int(spoilt)
