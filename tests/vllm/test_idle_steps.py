"""A step that computes nothing waits for a moment for loads to end, so that the threads that move KV can run; others do not."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvxfer.identity import TransferId
from kvxfer_vllm import worker as hooks
from kvxfer_vllm.metadata import StepMetadata
from tests.vllm.conftest import Make
from tests.vllm.test_sleep import BLOCKS, PAGE, Worker, pair  # noqa: F401  (the fixture)

LONG_S = 20.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "IDLE_S", LONG_S)


def seconds(worker: Worker, step: StepMetadata) -> float:
    begun = time.monotonic()
    worker.hooks.collect(step)
    return time.monotonic() - begun


def test_an_idle_step_ends_as_a_load_does(pair: tuple[Worker, Worker]) -> None:  # noqa: F811
    p, d = pair
    seconds(d, StepMetadata())  # the first report says where the worker listens
    transfer = TransferId("own/1/idle", 1)
    p.block(1)[:] = np.arange(PAGE) % 251
    d.load(transfer, p, BLOCKS - 2)
    p.offer(transfer, 1)
    taken = 0.0
    while not d.ended():
        taken += seconds(d, StepMetadata(idle=True))
    assert taken < LONG_S, "the end of the load ends the wait"
    assert (d.block(BLOCKS - 2) == p.block(1)).all()


def test_an_idle_step_in_which_nothing_ends_waits_so_long_and_no_longer(
    pair: tuple[Worker, Worker],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "IDLE_S", 0.2)
    seconds(pair[1], StepMetadata())
    assert 0.2 <= seconds(pair[1], StepMetadata(idle=True)) < 10.0


def test_a_step_that_computes_does_not_wait(pair: tuple[Worker, Worker]) -> None:  # noqa: F811
    assert seconds(pair[1], StepMetadata()) < LONG_S / 2
    assert seconds(pair[1], StepMetadata()) < LONG_S / 2


def test_the_scheduler_says_which_steps_compute_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "IDLE_S", 0.0)
    engine = make()
    engine.add(list(range(40)), n=1)
    said = []
    for _ in range(4):
        output = engine.step()
        meta = output.kv_connector_metadata
        assert isinstance(meta, StepMetadata)
        said.append((meta.idle, output.total_num_scheduled_tokens == 0))
    assert {idle for idle, _ in said} == {True, False} and all(idle == nothing for idle, nothing in said)
