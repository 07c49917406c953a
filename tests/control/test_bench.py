"""``kvxfer bench transfer`` and ``kvxfer bench load`` between two processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from itertools import pairwise

import numpy as np
import pytest

from kvxfer.cli.terminal import silent
from kvxfer.errors import KvxferError
from kvxfer.testing.remote import Remote
from kvxfer_bench.load.command import in_turns
from kvxfer_bench.load.phases import ALONE, CALM, LOADS, STAGES, OpenLoop, load_rows
from kvxfer_bench.load.played import PlayedWork, played
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


def test_what_loads_cost_busy_engines_is_one_table() -> None:
    """Of a small run, no time is known; but each load and cached prompt is counted, and each thread that had a part in it is named."""
    arrivals = OpenLoop(0.5, 20.0, (64, 256), 0)
    with played({"backend": "cma"}, PlayedWork(0.5, 1), PlayedWork(0.5, 1), 8) as measure:
        rounds = in_turns({"cma": measure}, arrivals, 1, silent)["cma"]
    (phases,) = rounds
    assert phases[CALM].loads == len(phases[CALM].cached) == len(phases[ALONE].cached) == 0
    assert all(phase.loads == len(phase.traces) > 0 for name, phase in phases.items() if name != CALM)
    assert (
        phases[LOADS].cached
        and phases[LOADS].decode.tokens
        and phases[CALM].prefill.tokens
        and not phases[ALONE].prefill.tokens
    )
    rows = {row.what: row for row in load_rows(rounds)}
    counts = sum(rows[f"first token, loaded, {n} tokens, median"].of for n in (64, 256) if n in phases[LOADS].loaded)
    assert counts == phases[LOADS].loads and rows["first token, cached, p99"].of == len(phases[LOADS].cached)
    threads = {
        side: {what.rsplit(", ")[-1] for what in rows if f"CPU a load, {side}" in what}
        for side in ("prefill", "decode")
    }
    assert {"control", "data", "channel", "dir", "engine"} <= threads["prefill"] & threads["decode"]
    for phase in (ALONE, LOADS):
        assert [f"{before} to {stage}, {phase}" in rows for before, stage in pairwise(STAGES)] == [True] * (
            len(STAGES) - 1
        )
