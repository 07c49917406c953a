"""What an engine pays for kvxfer while nothing moves."""

from __future__ import annotations

from kvxfer.bench.idle import measure_idle

HEAVY = {"torch", "vllm", "asyncio", "email", "concurrent", "numba", "triton", "zmq"}


def test_an_idle_agent_takes_little_memory_and_sleeps_and_importing_loads_little() -> None:
    """Times are for `kvxfer bench idle`: here, what they follow from."""
    found = measure_idle("zmq", 2.0)
    assert not HEAVY & set(found["imports"])
    assert found["agent_MiB"] < 15
    assert {"kvxfer-control", "kvxfer-data", "kvxfer-director"} <= set(found["wakeups_per_s"])
    assert all(rate <= 3 for rate in found["wakeups_per_s"].values())
