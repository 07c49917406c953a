"""The worker half: gives the step's commands to this rank's agent, and tells vLLM what has ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvxfer import memory
from kvxfer.config import Config
from kvxfer.geometry import Rank
from kvxfer.session import Agent, Ended, Stats
from kvxfer_vllm import compat
from kvxfer_vllm.clearing import Clearing
from kvxfer_vllm.layout import Layout
from kvxfer_vllm.layout_check import check_layout
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
        self._clearing: Clearing | None = None
        self._report = Report()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._blocks: dict[str, set[int]] = {}  # request -> logical blocks that its fetch fills
        self._failed_blocks: set[int] = set()
        self._failing: set[str] = set()  # fetches that ended badly and are not quiet yet
        self._early: set[str] = set()  # those of them that vLLM was told of
        self._quarantine = kv_cache_config.num_blocks // 4 if compat.HOLDS_BLOCKS else 0  # blocks of such, at most
        self._stats = KVXferStats()
        self._noted: Stats | None = None

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """The cache is allocated: describe it and start the agent."""
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        rank = Rank(get_pp_group().rank_in_group, get_tensor_model_parallel_rank())
        layout = Layout.of(tensors, self._kv, self._vllm, rank)
        if layout.cache.regions[0].device == "cpu":
            _ask_for_tile_registers()
        if self._config.layout_check:
            check_layout(layout.cache, tensors, self._vllm)
        if getattr(self._kv, "needs_kv_cache_zeroing", False):
            self._clearing = Clearing(tensors.values(), layout.cache)
        transfer = self._vllm.kv_transfer_config
        self.start(Agent(layout.cache, self._config, str(transfer.engine_id if transfer else "")), layout)

    def start(self, agent: Agent, layout: Layout) -> None:
        """Take up work with this agent, whose cache is laid out so."""
        self._agent, self._layout = agent, layout
        self._report.members[layout.cache.rank] = agent.member

    @property
    def _on(self) -> tuple[Agent, Layout]:
        assert self._agent is not None and self._layout is not None, "register_kv_caches was not called"
        return self._agent, self._layout

    def handshake(self) -> Handshake | None:
        return None if self._agent is None else Handshake(self._agent.member)

    def before_forward(self, step: Step) -> None:
        """Revocations take effect before this step can reuse a block, and a change of weights before it loads or offers."""
        agent, _ = self._on
        if step.facts is not None:
            agent.identify(step.facts)
        for revoke in step.commands.revokes:
            agent.revoke(revoke.transfer, revoke.generation, revoke.reason, revoke.gone)
        for transfer in step.renewals:
            agent.renew(transfer)

    def load(self, step: Step) -> None:
        """Begin this step's loads, and end those that are no longer wanted."""
        agent, layout = self._on
        self._sent.update(step.freed)
        self._received.update(step.doomed)
        self._failed.update(step.doomed)
        self._failed_blocks.update(*step.doomed.values())
        for fetch in step.commands.fetches:
            self._blocks[fetch.handle] = set(fetch.blocks.ids())
            blocks = layout.table(fetch.blocks)
            if self._clearing is not None:
                self._clearing.before(blocks, fetch.start, fetch.tokens)
            agent.fetch(replace(fetch, blocks=blocks))
        for cancel in step.commands.cancels:
            agent.cancel(cancel.handle, cancel.reason)

    def after_forward(self, step: Step) -> None:
        """Offer what this step has computed, behind a fence on the device."""
        agent, layout = self._on
        if not step.commands.offers:
            return
        fence = memory.fence(layout.cache.regions[0].device)
        for offer in step.commands.offers:
            agent.offer(replace(offer, blocks=layout.table(offer.blocks)), after=fence)

    def collect(self) -> None:
        """Take in what has ended since the last step."""
        agent, layout = self._on
        for event in agent.events():
            if event.role == "producer":
                if not isinstance(event, Ended):
                    ranks = self._report.released.setdefault(event.transfer, {})
                    ranks[layout.cache.rank] = max(event.generation, ranks.get(layout.cache.rank, -1))
            elif isinstance(event, Ended):
                self._stats.record(event)
                if event.outcome.delivered:
                    self._report.delivered.setdefault(event.handle, set()).add(event.generation)
                else:
                    self._failing.add(event.handle)
            else:
                self._still(event.handle)
        for handle in self._failing - self._early:
            self._give_up(handle)

    def _still(self, request: str) -> None:
        """A fetch is quiet."""
        blocks = self._blocks.pop(request)
        if request in self._early:
            self._early.discard(request)
            self._quarantine += len(blocks)
            self._report.still.setdefault(request, set()).add(self._on[1].cache.rank)
        else:
            self._received.add(request)
            if request in self._failing:
                self._failed.add(request)
                self._failed_blocks |= blocks
        self._failing.discard(request)

    def _give_up(self, request: str) -> None:
        """A fetch has failed, and may be long in getting quiet. The request need not wait for that if its blocks are
        kept from other use meanwhile."""
        blocks = self._blocks[request]
        if len(blocks) <= self._quarantine:
            self._quarantine -= len(blocks)
            self._early.add(request)
            self._received.add(request)
            self._failed.add(request)
            self._report.moving.setdefault(request, set()).add(self._on[1].cache.rank)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """(requests whose blocks vLLM may free, those whose load is over, those of them whose load failed), each
        reported once. The blocks of a load are quiet, or in the report as still moving."""
        out = self._sent, self._received, self._failed
        self._sent, self._received, self._failed = set(), set(), set()
        return out

    def failed_blocks(self) -> set[int]:
        """Logical blocks of failed loads, each reported once."""
        out, self._failed_blocks = self._failed_blocks, set()
        return out

    def report(self) -> Report | None:
        out, self._report = self._report, Report()
        return out or None

    def stats(self) -> KVXferStats | None:
        if self._agent is not None:
            before, self._noted = self._noted, self._agent.stats()
            rank = self._on[1].cache.rank
            self._stats.note(f"{rank.pp}.{rank.tp}", before, self._noted)
        if self._stats.is_empty():
            return None
        out, self._stats = self._stats, KVXferStats()
        return out

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()

    def __len__(self) -> int:
        """How much is remembered of loads, and of what is still to be reported; 0 when there is nothing."""
        kept = self._blocks, self._failing, self._early, self._sent, self._received, self._failed
        return sum(map(len, kept)) + bool(self._report)


def _ask_for_tile_registers() -> None:
    """Have this process ask the kernel for AMX tiles.

    A decode worker's first forward is a one-token step, which uses them without asking and dies of SIGILL; torch asks
    during longer steps only. Does nothing on other processors.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()
