"""The thread of a rank: it hears events, costs nothing once the agent is closed, and says nothing at the end of the program."""

import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from kvxfer import Cache, Config
from kvxfer_sglang.rank import EngineRank


@pytest.fixture
def rank() -> EngineRank:
    cache = Cache.of_tensors(np.zeros((2, 4, 16, 8), np.uint8), "layer block token unit", encoding="e")
    config = Config(backend="kvxfer.testing.fake:FakeTransport")
    return EngineRank(cache, config, "e", {"model": "m"}, lambda own: [own], lambda event: None)


def test_a_closed_agent_costs_no_time(rank: EngineRank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.agent.close()  # by somebody else, before the rank is closed
    calls, events = [], rank.agent.events
    monkeypatch.setattr(rank.agent, "events", lambda timeout=0.0: calls.append(timeout) or events(timeout))
    time.sleep(0.5)
    assert len(calls) < 5, "a thread spins"
    assert rank.close()


def test_a_closed_rank_has_no_thread_left(rank: EngineRank) -> None:
    assert rank.close() and rank.close()
    assert not rank._thread.is_alive()


def test_a_program_that_ends_says_nothing() -> None:
    """Its threads run until the end, while what they use is taken apart."""
    program = textwrap.dedent("""
        import numpy as np
        from kvxfer import Cache, Config
        from kvxfer_sglang.rank import EngineRank

        cache = Cache.of_tensors(np.zeros((2, 4, 16, 8), np.uint8), "layer block token unit", encoding="e")
        config = Config(backend="kvxfer.testing.fake:FakeTransport")
        ranks = [EngineRank(cache, config, f"e{n}", {"model": "m"}, lambda own: [own], lambda e: None) for n in range(3)]
    """)
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")
