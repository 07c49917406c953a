"""Threads that copy beside a back end's own."""

from __future__ import annotations

import threading
import time

import pytest

from kvxfer.memory.pool import CopyPool


def test_a_pool_works_at_the_same_time_and_ends_together() -> None:
    pool, meeting, ended = CopyPool(3, "pool"), threading.Barrier(3), []

    def work(fails: bool) -> None:
        meeting.wait(30)
        if fails:
            raise OSError("one of them")
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(OSError, match="one of them"):
        pool.do([lambda: work(False), lambda: work(True), lambda: work(False)])
    assert len(ended) == 2
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pool")]


def test_without_threads_a_pool_fails_once_and_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of what failed happens later, when its memory is somebody else's."""
    pool, done = CopyPool(3, "pool"), []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.do([lambda: done.append(0)] * 3)
    time.sleep(0.05)
    assert not done and pool.size == 1
    pool.do([lambda: done.append(0), lambda: done.append(1)])
    assert done == [0, 1]
