"""`kvxfer bench scale` at a small scale: each figure is there, and what is refused is counted as that."""

from __future__ import annotations

from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.protocol import serves
from kvxfer_bench import scale

pytestmark = pytest.mark.slow


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
    monkeypatch.setattr(serves, "MAX_BYTES", 8 * (serves.REQUEST_BYTES + 8))
    p, c = scale.ScaleEngine("tcp"), scale.ScaleEngine("tcp")
    try:
        c.fetch(p.source(), 0, 12)
        found = c.until(4, 20.0)
        assert found["outcomes"].get("overloaded", 0) >= 4 and "too many" in found["words"]["overloaded"]
    finally:
        p.close()
        c.close()


class Refusing:
    """Engines of which the consumer's loads are all refused but one."""

    def __init__(self, name: str, *_: Any) -> None:
        self._answers: list[Any] = []

    def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "until":
            ends = {"delivered": 1, "overloaded": arguments[0] - 1}
            return {"outcomes": ends, "words": {}, "missing": 0, "seconds": [0.01] * arguments[0]}
        vitals = {"cpu_s": 1.0, "MiB": 10.0, "threads": 3, "descriptors": 9}
        return {"vitals": vitals, "links": 1, "pace": 40}.get(method)

    def send(self, *call: Any) -> None:
        self._answers.append(self(*call))

    def get(self) -> Any:
        return self._answers.pop(0)

    def close(self) -> None:
        pass


def test_only_what_was_delivered_counts_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is refused ends sooner than one that is delivered, and had counted as one."""
    monkeypatch.setattr(scale, "QUIET_S", 0.0)
    monkeypatch.setattr(scale, "Remote", Refusing)
    monkeypatch.setattr(scale, "time", SimpleNamespace(monotonic=partial(next, count(0.0, 1.0)), sleep=lambda _: None))
    found = scale.measure_scale("tcp", 5000, 3, 50, 1.0, beyond=False)
    assert found["in_flight"][0]["outcomes"] == {"delivered": 1, "overloaded": 4999}
    assert found["in_flight"][0]["delivered_per_s"] <= 1 and found["rate"][0]["delivered_per_s"] <= 1
