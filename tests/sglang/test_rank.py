"""A rank hears of events only when it is asked to, leaves no thread, and says nothing at the end of the program."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import Cache, Config, Event, Generation, Released, TransferId
from kvxfer_sglang.rank import EngineRank


@pytest.fixture
def heard() -> list[tuple[Event, str]]:
    """The events, each with the thread on which it was heard."""
    return []


@pytest.fixture
def others() -> set[threading.Thread]:
    """The threads that there are before the rank's, such as those that other tests of this process have left."""
    return set(threading.enumerate())


@pytest.fixture
def rank(others: set[threading.Thread], heard: list[tuple[Event, str]]) -> Iterator[EngineRank]:
    def hear(event: Event) -> None:
        heard.append((event, threading.current_thread().name))
        raise ValueError("which keeps no other event from being heard")

    cache = Cache.of_tensors(np.zeros((2, 4, 16, 8), np.uint8), "layer block token unit", encoding="e")
    config = Config(backend="kvxfer.testing.fake:FakeTransport")
    rank = EngineRank(cache, config, "e", {"model": "m"}, lambda own: [own], hear)
    yield rank
    rank.close()


def test_events_are_heard_on_the_thread_that_asks(rank: EngineRank, heard: list[tuple[Event, str]]) -> None:
    rank.hear()
    rank.agent.revoke(TransferId.mint(1, "x"), Generation(1), "it is not needed", gone=True)
    assert rank._woken.wait(20) and not heard
    while not any(isinstance(event, Released) for event, _ in heard):
        rank.hear()
    assert {name for _, name in heard} == {threading.current_thread().name} and len(heard) == 2


def test_a_closed_rank_has_no_thread_left(rank: EngineRank, others: set[threading.Thread]) -> None:
    started = {thread for thread in threading.enumerate() if thread.name.startswith("kvxfer")} - others
    assert started and rank.close() and rank.close()
    assert not {thread for thread in started if thread.is_alive()}


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
