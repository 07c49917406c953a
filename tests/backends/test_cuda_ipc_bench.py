"""``kvxfer bench cuda-ipc`` without a GPU: that it notices wrong bytes, and does not pass when something has failed."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import KvxferError
from kvxfer.geometry import CopyPattern, CopyPlan, StridedCopy
from kvxfer.geometry.region import flat_starts
from tests.conftest import require

require("torch")
torch = pytest.importorskip("torch")
measuring = pytest.importorskip("kvxfer_bench.cuda_ipc.measuring")

ROW = 256
"""A head of a token."""


class Mover:
    """Moves a plan as the consumer's transport should, then writes -2 to so many more words after the last."""

    def __init__(self, memory: Any, stray: int) -> None:
        self._memory, self._stray = memory, stray

    def batch(self, plan: CopyPlan) -> CopyPlan:
        return plan

    def move(self, plan: CopyPlan) -> None:
        runs = plan.runs()
        for src, dst, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
            words = measuring.signed(torch.arange(src // 4, (src + n) // 4))
            self._memory[dst // 4 : (dst + n) // 4] = words
        after = int((runs.dst + runs.length).max()) // 4
        self._memory[after : after + self._stray] = -2


@pytest.mark.parametrize("stray", [0, 1, 64, 65])
def test_every_word_that_should_not_be_there_counts(stray: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole head of a token, 64 words, had been let pass."""
    monkeypatch.setattr(measuring, "LAYER_BYTES", 1 << 16)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert flat_starts(measuring.regions(1 << 40, 0))[0] == 0
    memory = torch.zeros(measuring.LAYERS * measuring.LAYER_BYTES // 4, dtype=torch.int32)
    at = np.arange(8, dtype=np.int64) * ROW
    one = CopyPattern(at, at[::-1].copy(), (), ROW)
    plan = CopyPlan((StridedCopy(one, np.array([4096]), np.array([8192]), np.ones(1, np.int64)),))
    assert measuring.check(Mover(memory, stray), memory, plan) == stray


def played_producer(pipe: Connection, device: int) -> None:
    pipe.send("ready")
    pipe.recv_bytes()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Runs these sections in place of its own; returns what is printed."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(measuring.multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setattr(measuring, "serve", played_producer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "played")

    def runs(sections: dict[str, Callable[[], None]], ends: str | None) -> list[dict[str, Any]]:
        def played(*_: Any) -> Iterator[tuple[str, Callable[[], None]]]:
            yield from sections.items()

        monkeypatch.setattr(measuring, "sections", played)
        if ends is None:
            measuring.measure(100.0, None, 0)
        else:
            with pytest.raises(KvxferError, match=ends):
                measuring.measure(100.0, None, 0)
        return [json.loads(line) for line in capfd.readouterr().out.splitlines()]

    return runs


def test_it_fails_if_a_section_has(run: Callable[..., list[dict[str, Any]]]) -> None:
    """The others are measured all the same. It had passed."""
    done: list[str] = []
    assert [row["section"] for row in run({"good": lambda: done.append("good")}, None)] == ["setup", "end"]
    said = run({"bad": lambda: print(1 // 0), "good": lambda: done.append("again")}, "what failed: bad")
    assert [row["section"] for row in said] == ["setup", "bad", "end"] and "ZeroDivisionError" in said[1]["error"]
    assert done == ["good", "again"]
