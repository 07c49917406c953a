"""The worker half: gives the step's commands to this rank's agent, and tells vLLM what has ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvxfer import memory
from kvxfer.config import Config
from kvxfer.geometry import Rank
from kvxfer.identity import TransferId
from kvxfer.session import Agent, Ended, Fetch, Offered
from kvxfer_vllm.layout import Layout
from kvxfer_vllm.metadata import Handshake, Report, Step
from kvxfer_vllm.stats import KVXferStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["WorkerHalf"]

log = logging.getLogger("kvxfer.vllm")


class WorkerHalf:
    """One rank. All methods run on the worker's main thread."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config, self._vllm, self._kv = config, vllm_config, kv_cache_config
        self._agent: Agent | None = None
        self._layout: Layout | None = None
        self._released: dict[TransferId, dict[Rank, int]] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._requests: dict[str, str] = {}  # fetch handle -> vLLM request
        self._blocks: dict[str, set[int]] = {}  # fetch handle -> logical blocks that it fills
        self._failed_blocks: set[int] = set()
        self._failing: set[str] = set()  # fetches that ended badly and are not quiet yet
        self._stats = KVXferStats()

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """The cache is allocated: describe it and start the agent."""
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        rank = Rank(get_pp_group().rank_in_group, get_tensor_model_parallel_rank())
        self._layout = Layout.of(tensors, self._kv, self._vllm, rank)
        if self._layout.cache.regions[0].device == "cpu":
            _ask_for_tile_registers()
        transfer = self._vllm.kv_transfer_config
        self._agent = Agent(self._layout.cache, self._config, str(transfer.engine_id if transfer else ""))

    @property
    def _on(self) -> tuple[Agent, Layout]:
        assert self._agent is not None and self._layout is not None, "register_kv_caches was not called"
        return self._agent, self._layout

    def handshake(self) -> Handshake | None:
        return None if self._agent is None else Handshake(self._agent.member)

    def before_forward(self, step: Step) -> None:
        """Revocations take effect before this step can reuse a block."""
        agent, _ = self._on
        for revoke in step.commands.revokes:
            agent.revoke(revoke.transfer, revoke.generation, revoke.reason, revoke.gone)
        for transfer in step.renewals:
            agent.renew(transfer)

    def load(self, step: Step) -> None:
        """Begin this step's loads, and end those that are no longer wanted."""
        agent, layout = self._on
        self._received.update(step.doomed)
        self._failed.update(step.doomed)
        for want in step.commands.wants:
            request = step.loads[want.transfer]
            self._requests[str(want.transfer)] = request
            self._blocks[str(want.transfer)] = {b for row in want.blocks for b in row if b >= 0}
            agent.fetch(
                Fetch(
                    str(want.transfer), want.transfer, want.digest, want.source, layout.tables(want.blocks),
                    want.start, want.tokens, want.own,
                )  # fmt: skip
            )
        for cancel in step.commands.cancels:
            agent.cancel(str(cancel.transfer), cancel.reason)

    def after_forward(self, step: Step) -> None:
        """Offer what this step has computed, behind a fence on the device."""
        agent, layout = self._on
        if not step.commands.offers:
            return
        fence = memory.fence(layout.cache.regions[0].device)
        for offer in step.commands.offers:
            agent.offer(
                Offered(
                    offer.transfer, offer.digest, offer.generation, offer.tokens, layout.tables(offer.blocks),
                    offer.final,
                ),  # fmt: skip
                after=fence,
            )

    def collect(self) -> None:
        """Take in what has ended since the last step."""
        agent, layout = self._on
        for event in agent.events():
            if event.role == "producer":
                if not isinstance(event, Ended):
                    self._released[event.transfer] = {layout.cache.rank: event.generation}
            elif isinstance(event, Ended):
                self._stats.record(event)
                if not event.outcome.delivered:
                    self._failing.add(event.handle)
            else:
                request, blocks = self._requests.pop(event.handle), self._blocks.pop(event.handle)
                self._received.add(request)
                if event.handle in self._failing:
                    self._failing.discard(event.handle)
                    self._failed.add(request)
                    self._failed_blocks |= blocks

    def results(self) -> tuple[set[str], set[str]]:
        """(requests whose load has ended and is quiet, those of them whose load failed), each reported once."""
        out = self._received, self._failed
        self._received, self._failed = set(), set()
        return out

    def failed_blocks(self) -> set[int]:
        """Logical blocks of failed loads, each reported once."""
        out, self._failed_blocks = self._failed_blocks, set()
        return out

    def report(self) -> Report | None:
        if not self._released:
            return None
        out, self._released = Report(self._released), {}
        return out

    def stats(self) -> KVXferStats | None:
        if self._stats.is_empty():
            return None
        out, self._stats = self._stats, KVXferStats()
        return out

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()



def _ask_for_tile_registers() -> None:
    """Have this process ask the kernel for AMX tiles.

    A decode worker's first forward is a one-token step, which uses them without asking and dies of SIGILL; torch asks
    during longer steps only. Does nothing on other processors.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()
