"""``kvxfer bench plan``: that it measures what it says, not how fast."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from kvxfer.cli.bench import bench


def test_bench_plan_prints_one_object_with_units_in_its_keys() -> None:
    done = CliRunner().invoke(bench, ["plan", "--json", "--tokens", "1000", "--repeat", "1"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert {"worst_cold_ms", "worst_warm_ms", "worst_runs_ns_per_run"} <= found.keys()
    assert found["consecutive_runs"] == {"LBNHC": 80, "BLNHC": 80, "2BNHD": 160}
    assert len(found["pairs"]) > 10
    for pair in found["pairs"]:
        assert pair["cold_ms"] > 0 and pair["warm_ms"] > 0 and pair["rows"] >= pair["copies"] > 0
        heads = 8 if "heads" not in pair["producer"] + pair["consumer"] else 0
        assert not heads or pair["kv_bytes"] == 1000 * 80 * 8 * 512


def test_bench_plan_prints_a_table() -> None:
    done = CliRunner().invoke(bench, ["plan", "--tokens", "256", "--repeat", "1"])
    assert done.exit_code == 0, done.output
    assert "worst pair: " in done.output
