"""`kvxfer bench scale` at a small scale: each figure is there, and what is refused is counted as that."""

from __future__ import annotations

import pytest

from kvxfer.bench import scale
from kvxfer.protocol import serves


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "QUIET_S", 0.2)
    found = scale.measure_scale("tcp", 40, 3, 50, 1.0, beyond=False)
    (flight,), links, (rate,) = found["in_flight"], found["links"], found["rate"]
    assert flight["outcomes"] == {"delivered": 40} and flight["delivered_per_s"] > 0 and not flight["missing"]
    assert set(flight["while_they_wait"]) == {"producer", "consumer"}
    assert (
        links["links"] == 3 and links["outcomes"] == {"delivered": 3} and links["idle"]["producer"]["descriptors"] > 0
    )
    assert 10 < rate["outcomes"]["delivered"] <= 50 and not rate["missing"]
    assert rate["processes"]["producer"]["cpu_ms_per_load"] > 0 and rate["ms_99th"] >= rate["ms_median"] > 0


def test_loads_beyond_a_bound_are_told_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two in one process, whose bound can be set."""
    monkeypatch.setattr(serves, "MOST_BYTES", 8 * (serves.REQUEST_BYTES + 8))
    p, c = scale.ScaleEngine("tcp"), scale.ScaleEngine("tcp")
    try:
        c.fetch(p.source(), 0, 12)
        found = c.until(4, 20.0)
        assert found["outcomes"].get("overloaded", 0) >= 4 and "too many" in found["words"]["overloaded"]
    finally:
        p.close()
        c.close()
