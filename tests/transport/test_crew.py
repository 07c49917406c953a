"""Threads that copy beside a back end's own."""

from __future__ import annotations

import threading
import time

import pytest

from kvxfer.transport.crew import Crew


def test_a_crew_works_at_the_same_time_and_ends_together() -> None:
    crew, meeting, ended = Crew(3, "crew"), threading.Barrier(3), []

    def work(fails: bool) -> None:
        meeting.wait(5)
        if fails:
            raise OSError("one of them")
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(OSError, match="one of them"):
        crew.do([lambda: work(False), lambda: work(True), lambda: work(False)])
    assert len(ended) == 2
    crew.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("crew")]


def test_without_threads_a_crew_fails_once_and_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of what failed happens later, when its memory is somebody else's."""
    crew, done = Crew(3, "crew"), []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            crew.do([lambda: done.append(0)] * 3)
    time.sleep(0.05)
    assert not done and crew.size == 1
    crew.do([lambda: done.append(0), lambda: done.append(1)])
    assert done == [0, 1]
