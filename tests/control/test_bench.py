"""``kvxfer bench transfer`` between two processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading

import numpy as np
import pytest

from kvxfer.errors import KvxferError
from kvxfer.testing.remote import Remote
from kvxfer_bench.transfer.command import measure
from kvxfer_bench.transfer.engine import Meeting
from kvxfer_bench.transfer.pair import pair
from kvxfer_bench.transfer.shapes import MODELS, Request

PAGES = MODELS["pages-of-16k"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zmq", "cma", "nixl"])
def test_what_is_measured(backend: str) -> None:
    out = measure(backend, {}, "cpu", 16 * 64, "pages-of-16k", 2, 16 << 20, "sample", at_once=3)
    assert out["kv_bytes"] == 64 << 14
    timed = {k: v for k, v in out.items() if k.endswith(("_ms", "_GB_per_s", "_us"))}
    assert all(v > 0 for v in timed.values())
    assert {
        "transport_ms",
        "transport_after_pause_ms",
        "session_ms",
        "session_after_pause_ms",
        "checked_fetch_ms",
        "at_once_ms",
    } <= set(timed)
    assert out["at_once"] == 3 and out["at_once_GB_per_s"] == pytest.approx(
        3 * out["kv_bytes"] / out["at_once_ms"] / 1e6, rel=0.01
    )


def test_each_round_is_timed_and_wrong_bytes_are_told() -> None:
    request = Request(PAGES, 16 * 8)
    with pair("zmq", {}, PAGES, request.blocks, ("cpu", "cpu"), 16 << 20) as both:
        both.connect()
        times, said = both.move(request.src, request.dst, 3, 0.01)
        assert len(times) == 3 and all(0 < t < 30 for t in times) and said["bytes"] == 8 << 14
        both.expect(request.dst, request.src, "good")
        with pytest.raises(KvxferError, match="the bad run delivered wrong bytes"):
            both.expect(request.dst, np.roll(request.src, 1), "bad")


def test_words_and_meetings_on_one_pipe() -> None:
    """The one that is ahead waits for the other, which still hears all that was told before."""
    one, two = (Meeting(end) for end in mp.Pipe())
    one.tell(1, 2)
    ahead = threading.Thread(target=one.meet)
    ahead.start()
    assert two.hear() == (1, 2)
    assert two.hear() is None
    assert ahead.is_alive()
    two.meet()
    ahead.join(30)
    assert not ahead.is_alive()


class Chatty:
    """Prints as a library does that is written in C."""

    def speak(self) -> str:
        os.write(1, b"a library's complaint\n")
        return "said"

    def close(self) -> None:
        pass


def test_what_libraries_print_is_no_part_of_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    remote = Remote("chatty", Chatty)
    try:
        assert remote("speak") == "said"
    finally:
        remote.close()
    out, err = capfd.readouterr()
    assert out == "" and "a library's complaint" in err
