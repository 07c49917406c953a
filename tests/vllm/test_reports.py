"""Reports as any worker may give them: plain ids in a `KVConnectorOutput`, nothing of ours. No rank has introduced itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.vllm.cases import OFFER
from tests.vllm.conftest import Make
from tests.vllm.engine import FULL, HYBRID, PlayedEngine, ours, prompt

LOAD = {
    "do_remote_prefill": True,
    "remote_host": "127.0.0.1",
    "remote_port": 9,
    "kvxfer_transfer": "own/1/x",
    "kvxfer_epoch": "1",
}
POLICIES = pytest.mark.parametrize("policy", ["recompute", "fail"])


class Plain:
    """An engine whose steps have the results that a test gives them."""

    def __init__(self, engine: PlayedEngine) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        ours(self.scheduler.connector)._sched.side._descriptors.clear()

    def step(self, **kv: Any) -> SchedulerOutput:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        done = [self.scheduler.requests[n].num_computed_tokens >= self.scheduler.requests[n].num_tokens for n in names]
        sampled = [[7] if d else [] for d in done]
        result = ModelRunnerOutput(
            names, {n: i for i, n in enumerate(names)}, sampled, kv_connector_output=KVConnectorOutput(**kv)
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for o in outputs.outputs:
                if o.finish_reason is not None:
                    self.engine.done[o.request_id] = o
        return output

    def drain(self) -> None:
        for _ in range(40):
            if self.scheduler.has_requests():
                self.step()
        assert not self.scheduler.has_requests()


@pytest.fixture
def plain(make: Make) -> Iterator[Any]:
    made: list[Plain] = []

    def build(groups: Any = FULL, **more: Any) -> Plain:
        made.append(Plain(make(groups, **more)))
        return made[-1]

    yield build
    for engine in made:
        engine.drain()


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_sent(plain: Any, groups: Any) -> None:
    e = plain(groups)
    name = e.engine.add(prompt(50), OFFER, n=1)
    e.step()
    assert name in e.scheduler.requests and e.engine.free < e.engine.blocks - 1
    assert e.engine.done[name].kv_transfer_params["do_remote_prefill"]
    e.step()
    e.step(finished_sending={name})
    assert name not in e.scheduler.requests and e.engine.free == e.engine.blocks - 1


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_received(plain: Any, groups: Any) -> None:
    e = plain(groups)
    name = e.engine.add(prompt(50), LOAD)
    e.step()
    assert e.engine.status(name) == "WAITING_FOR_REMOTE_KVS"
    e.step(finished_recving={name})
    output = e.step()
    assert output.num_scheduled_tokens == {name: 1}
    e.drain()
    assert len(e.engine.done[name].new_token_ids) == 1


@POLICIES
def test_failed_by_request(plain: Any, policy: str) -> None:
    e = plain(policy=policy)
    name = e.engine.add(prompt(50), LOAD)
    e.step()
    e.step(finished_recving={name}, failed_recving={name})
    output = e.step()
    assert output.num_scheduled_tokens == ({name: 50} if policy == "recompute" else {})
    assert (name in e.engine.done) == (policy == "fail")


@POLICIES
def test_failed_by_block(plain: Any, policy: str) -> None:
    """As a partial load is reported: what is whole in front of the block is kept."""
    e = plain(policy=policy)
    name = e.engine.add(prompt(50), LOAD)
    e.step()
    (row,) = e.scheduler.kv_cache_manager.get_block_ids(name)
    e.step(finished_recving={name}, invalid_block_ids={row[2]})
    output = e.step()
    assert output.num_scheduled_tokens == ({name: 18} if policy == "recompute" else {})


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_while_received(plain: Any, steps: int) -> None:
    e = plain()
    name = e.engine.add(prompt(50), LOAD)
    for _ in range(steps):
        e.step()
    e.engine.abort(name)
    assert (name in e.scheduler.requests) == (steps > 0)
    e.step(finished_recving={name} if steps else None)
    assert name not in e.scheduler.requests


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_abort_while_prefilled(plain: Any, groups: Any) -> None:
    """Nobody can have found what was offered, so nothing is kept."""
    e = plain(groups)
    name = e.engine.add(prompt(150), OFFER, n=1)
    e.step()
    e.step()
    e.engine.abort(name)
    assert e.engine.free == e.engine.blocks - 1
