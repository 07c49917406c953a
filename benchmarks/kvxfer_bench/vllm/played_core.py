"""vLLM's own engine loop over a worker whose forward pass is simulated: its steps, its queue of batches, its sleep after an empty step.

The worker lies in the process of the loop, as vLLM has it for one GPU, and calls the connector's hooks in the order of vLLM's second model
runner.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvxfer_bench.vllm.played_prefill import sleep_until


class PlayedCore(EngineCoreProc):
    """vLLM's engine loop, without its processes and sockets.

    Args:
        config: vLLM's.
        scheduler: Makes what plans its steps; the connector finds this loop while that is being made.
        overlap: Whether a step is planned and launched while the one before it runs, and its results are seen a step later.
    """

    def __init__(self, config: VllmConfig, scheduler: Callable[[], Any], overlap: bool) -> None:
        self.input_queue: Any = queue.Queue()
        self.output_queue: Any = queue.Queue()
        self.aborts_queue: Any = queue.Queue()
        self.vllm_config, self.scheduler = config, scheduler()
        self.log_stats = self.publish_dp_lb_stats = self.check_for_draft_tokens = False
        self.is_mm_encoder_only = self.is_pooling_model = False
        self.batch_queue_size, self.async_scheduling = 1 + overlap, overlap
        self.batch_queue: Any = deque(maxlen=2) if overlap else None
        self.step_fn = self.step_with_batch_queue if overlap else self.step
        self._weight_version = "default"

    def computes_with(self, worker: PlayedWorker) -> None:
        """Have this worker compute the steps."""
        self.model_executor = worker

    def make_step(self) -> None:
        """Make what vLLM's loop calls a step."""
        self._process_engine_step()
        while not self.output_queue.empty():
            self.output_queue.get_nowait()


class PlayedWorker:
    """vLLM's executor and worker in one.

    Args:
        connector: In the worker's role.
        scheduler: Knows the requests.
        step_s: What a forward pass takes.
        launched: Called with each step as it is launched.
    """

    def __init__(
        self, connector: Any, scheduler: Any, step_s: float, launched: Callable[[SchedulerOutput], object]
    ) -> None:
        self._connector, self._scheduler, self._step_s, self._launched = connector, scheduler, step_s, launched
        self._ends = 0.0  # of the device's last step
        self._output: SchedulerOutput | None = None
        self.max_concurrent_batches = 2

    def execute_model(self, output: SchedulerOutput, non_block: bool = False) -> Any:
        """Launch a step; one that computes nothing is over with that."""
        self._launched(output)
        w = self._connector
        w.handle_preemptions(output.kv_connector_metadata)
        w.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            w.start_load_kv(SimpleNamespace(attn_metadata=None))
        self._output = output
        if output.num_scheduled_tokens:
            self._ends = max(self._ends, time.monotonic()) + self._step_s
            return _Done(lambda: None) if non_block else None
        result = self._finish([], [])
        return _Done(lambda: result) if non_block else result

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        """Return the step's tokens, once the device has computed them."""
        output, ends = self._output, self._ends
        assert output is not None
        names = list(output.num_scheduled_tokens)
        requests = self._scheduler.requests
        whole = [requests[name].num_computed_tokens >= requests[name].num_prompt_tokens for name in names]
        if not non_block:
            sleep_until(ends)
        result = self._finish(names, [[7] if done else [] for done in whole])

        def computed() -> ModelRunnerOutput:
            sleep_until(ends)
            return result

        return _Done(computed) if non_block else result

    def _finish(self, names: list[str], tokens: list[list[int]]) -> ModelRunnerOutput:
        w, output = self._connector, self._output
        assert output is not None
        if not output.has_sync_kv_loads:
            w.start_load_kv(SimpleNamespace(attn_metadata=None))
        w.wait_for_save()
        kv = output_of(w, output.finished_req_ids)
        kv.kv_connector_worker_meta = w.build_connector_worker_meta()
        w.clear_connector_metadata()
        if not names:
            return ModelRunnerOutput.with_kv_conn_output_only(kv)
        return ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens, kv_connector_output=kv)


class _Done(Future[Any]):
    """A future whose result is waited for where it is asked for, as vLLM waits for its device."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> Any:
        return self._wait()


def output_of(connector: Any, finished: set[str]) -> KVConnectorOutput:
    """Collect what a worker's connector reports after a step, with the calls that a model runner makes."""
    found = connector.get_transfer_results(finished)
    return KVConnectorOutput(
        found.finished_sending,
        found.finished_recving,
        failed_recving=found.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
    )
