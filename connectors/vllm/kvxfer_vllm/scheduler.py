"""The scheduler half: vLLM's scheduler hooks turned into calls of ``kvxfer.schedule``, its commands into step metadata.

All methods run on the engine-core thread; none blocks. The directory has a thread of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer.facts import sealed
from kvxfer.identity import Address, Source, TransferId, digest, external_id, new_epoch
from kvxfer.schedule import RankAgreement, Schedule, ScheduleError
from kvxfer.security import Security
from kvxfer.session import Decline, Directory, Member, Named, Renew
from kvxfer.values import BlockTable, Rank
from kvxfer_vllm import compat
from kvxfer_vllm import params as p
from kvxfer_vllm.giving import Giving
from kvxfer_vllm.holds import Holds
from kvxfer_vllm.identity import facts_of, updated
from kvxfer_vllm.metadata import Handshake, Report, Step
from kvxfer_vllm.migration import params_of
from kvxfer_vllm.recurrent import leave_last_token
from kvxfer_vllm.settings import counts_media, groups_of
from kvxfer_vllm.taking import Taking

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerHalf"]

log = logging.getLogger("kvxfer.vllm")

NULL_BLOCK = 0
"""vLLM's block 0 stands for "no block"; it never holds data."""


class SchedulerHalf:
    """One engine's schedule and directory."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        assert transfer is not None
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._engine, self._tp = str(transfer.engine_id), parallel.tensor_parallel_size
        self._world = parallel.world_size
        self._facts = facts_of(vllm_config, config)
        self._news: dict[str, str] | None = self._facts  # what the workers have not heard of yet
        self._directory = Directory(
            self._engine,
            new_epoch(),
            config.listen,
            config.port,
            config.advertise,
            security=Security.of(config),
            facts=self._facts,
        )
        here = self._directory.source
        self._source = Source(here.host, here.port, here.epoch)
        groups = groups_of(kv_cache_config)
        self._counts_media = counts_media(vllm_config)
        self._recurrent = any(group.kind == "state" for group in groups)
        self._schedule = Schedule(groups, self._source if self._world > 1 else None)
        self._holds = Holds(kv_cache_config.num_blocks // 4)
        self._giving = Giving(self._schedule.producer, self._holds, groups, self._world)
        self._taking = Taking(self._schedule.consumer, self._holds)
        self._quorum = RankAgreement()
        self._seen: set[str] = set()
        self._offers: dict[str, TransferId] = {}  # request -> what it offers
        self._loads: dict[str, TransferId] = {}  # request -> what it loads
        self._doomed: dict[str, tuple[int, ...]] = {}  # loads that failed before they began, and their blocks
        self._computed: dict[str, int] = {}  # request -> local tokens at its last match
        self._tables: dict[str, list[list[int]]] = {}  # whole tables, where vLLM tells increments only
        self._members: dict[Rank, Member] = {}
        self._renewed = 0.0

    # --- requests --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Learn what a request offers or loads, the first time that we hear of it. What it is found to be it stays."""
        if request.request_id in self._seen:
            return
        self._seen.add(request.request_id)
        try:
            params = request.kv_transfer_params or self._legacy(request)
            if params:
                self._take_up(request, params)
        except KvxferError as e:  # an id or a prompt that cannot be named: no transfer, the request goes on
            log.warning("request %s takes no part in KV transfer: %s", request.request_id, e)

    def _legacy(self, request: Request) -> dict[str, Any] | None:
        """Params out of a request id in the form of P2pNcclConnector, where the configuration allows that."""
        hosts = self._config.legacy_hosts
        if not hosts:
            return None
        own = Address(self._source.host, self._source.port)
        return params_of(
            external_id(request.request_id), produces=self._produces, consumes=self._consumes, own=own, hosts=hosts
        )

    def _take_up(self, request: Request, params: dict[str, Any]) -> None:
        offers, loads = self._produces and p.is_offer(params), self._consumes and p.is_load(params)
        if not offers and not loads:
            return
        name, content = request.request_id, self._digest(request)  # of the whole prompt, before it may be cut
        external = external_id(name)
        if offers:
            transfer = p.offered_id(params, self._source.epoch, external)
            if self._recurrent:
                leave_last_token(request)
            if self._schedule.producer.arrive(name, transfer, content, request.num_prompt_tokens):
                self._offers[name] = transfer
        if loads:
            want = p.wanted(params, external)
            if isinstance(want, str):
                log.warning("request %s is computed here: %s", name, want)
                return
            transfer, source = want
            # The last prompt token is computed here in any case, so its KV need not come.
            tokens = request.num_prompt_tokens - 1
            if not tokens:  # nothing to load; a request that vLLM's front end has refused comes so, without its prompt
                content = p.digest_of(params) or content
            if self._schedule.consumer.arrive(name, transfer, content, source, tokens):
                self._loads[name] = transfer

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        self.arrive(request)
        if request.request_id not in self._loads:
            return 0, False
        self._computed[request.request_id] = computed
        tokens = self._schedule.consumer.matched(request.request_id, computed)
        if request.skip_reading_prefix_cache:  # it needs its whole prompt computed; vLLM before 0.31 leaves that to us
            return 0, False
        return tokens, bool(tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        name = request.request_id
        if name in self._loads:
            table = _table(blocks.get_block_ids())
            try:
                self._schedule.consumer.allocated(name, table, self._computed.get(name, 0), external)
            except ScheduleError as e:
                # An exception here would end the engine; a load that fails at once costs this request only.
                log.error("request %s cannot be loaded: %s", name, e)
                self._doomed[name] = table.ids()
                self._schedule.consumer.finish(name, f"the consumer cannot load it: {e}")

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: its blocks stay until all ranks have reported them quiet."""
        from vllm.v1.request import RequestStatus

        name = request.request_id
        whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        transfer = self._offers.pop(name, None)
        self._seen.discard(name)
        for of in (self._loads, self._computed, self._tables):
            of.pop(name, None)  # type: ignore[attr-defined]
        self._schedule.consumer.finish(name)
        held = self._giving.finished(name, transfer, _table(block_ids), whole, found=bool(self._members))
        if not held or transfer is None:
            return held, None
        return True, p.answer(
            transfer,
            self._schedule.producer.digest(transfer),
            self._source,
            self._engine,
            name,
            self._tp,
            block_ids,
            request.num_prompt_tokens,
        )

    def _digest(self, request: Request) -> bytes:
        if request.mm_features and self._counts_media:
            raise KvxferError(
                "its images or other media have no identity by content, since vLLM caches none; set "
                "--mm-processor-cache-gb above 0, or --enable-prefix-caching"
            )
        lora = request.lora_request
        embeds = request.prompt_embeds
        return digest(
            tokens=request.prompt_token_ids,
            model=sealed(self._facts),
            media=[(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features or ()],
            lora=None if lora is None else lora.lora_name,
            salt=request.cache_salt,
            embeds=None if embeds is None else _embeds(embeds, getattr(request, "prompt_is_token_ids", None)),
        )

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> Step:
        """Follow what this step computes, and say what the workers must know with it."""
        for name in output.preempted_req_ids or ():
            self._schedule.preempt(name)
            self._giving.preempted(name)
        if self._offers:
            self._follow(output)
        renewals = self._notices()
        for decline in self._schedule.consumer.declines():
            named = Named(decline.transfer, decline.digest)
            self._tell(decline.source, Decline(decline.source.epoch, (named,), decline.reason))
        self._renew()
        commands = self._schedule.commands()
        for fetch in commands.fetches:
            self._taking.begins(fetch.handle, fetch.blocks.ids())
        step = Step(commands, self._doomed, renewals, self._giving.step(commands), self._news)
        self._doomed, self._news = {}, None
        return step

    def _follow(self, output: SchedulerOutput) -> None:
        state = getattr(output, "kv_connector_block_state", None)
        whole = getattr(state, "get_block_ids", None)
        cached = output.scheduled_cached_reqs
        seen: list[tuple[str, int]] = []
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(row) for row in new.block_ids]
            seen.append((new.req_id, new.num_computed_tokens))
        for i, name in enumerate(cached.req_ids):
            self._grow(name, cached.new_block_ids[i], name in cached.resumed_req_ids)
            seen.append((name, cached.num_computed_tokens[i]))
        for name, computed in seen:
            if name in self._schedule.producer:
                table = whole(name) if whole is not None else None
                rows = _table(table if table is not None else self._tables[name])
                self._giving.runs(name, computed, output.num_scheduled_tokens[name], rows)
            else:
                self._tables.pop(name, None)

    def _grow(self, name: str, new: Sequence[Sequence[int]] | None, resumed: bool) -> None:
        """New blocks are appended; those of a resumed request replace its table."""
        if resumed and new is not None:
            self._tables[name] = [list(row) for row in new]
        elif new is not None and name in self._tables:
            for row, more in zip(self._tables[name], new, strict=True):
                row.extend(more)

    def _notices(self) -> tuple[TransferId, ...]:
        """What consumers' scheduler halves have told our directory."""
        renewals: list[TransferId] = []
        for notice in self._directory.notices():
            for named in notice.transfers:
                if not self._schedule.producer.offers(named.transfer, named.digest):
                    continue  # over, or somebody guessed its name
                if isinstance(notice, Renew):
                    renewals.append(named.transfer)
                else:
                    self._schedule.producer.withdraw(named.transfer, notice.reason)
        return tuple(renewals)

    def _renew(self) -> None:
        """Keep alive what requests of ours still wait for, from their arrival on."""
        now = time.monotonic()
        if now - self._renewed < self._config.lease / 4:
            return
        self._renewed = now
        by_source: dict[Source, list[Named]] = {}
        for transfer, (content, source) in self._schedule.consumer.waiting.items():
            by_source.setdefault(source, []).append(Named(transfer, content))
        for source, named in by_source.items():
            self._tell(source, Renew(source.epoch, tuple(named)))

    def _tell(self, source: Source, message: Renew | Decline) -> None:
        self._directory.tell(source, message)

    def update(self, output: KVConnectorOutput) -> None:
        """What the workers have reported: loads that are over, offers that all ranks are done with."""
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._learn(report)
        for name in output.finished_recving or ():
            generations = self._quorum.over(name)
            if len(generations) > 1 and name in self._loads:
                self._reject(name, generations)
                compat.hold_back(output, name)
            else:
                self._taking.over(name)
        for name in output.finished_sending or ():
            self._giving.sent(name)

    def _reject(self, name: str, generations: Sequence[int]) -> None:
        """Each rank's load went well, but what they hold does not belong together. vLLM hears of its end with the next step,
        in which our workers report it as failed."""
        log.warning(
            "request %s cannot use what was loaded: the producer computed it anew meanwhile, and our ranks hold generations %s",
            name,
            " and ".join(map(str, generations)),
        )
        self._doomed[name] = self._taking.blocks(name)

    def _learn(self, report: Report) -> None:
        if report.members:
            self._members |= report.members
            self._announce()
        for name, generations in report.delivered.items():
            self._quorum.delivered(name, generations)
        for name, ranks in report.moving.items():
            self._taking.moving(name, ranks)
        for name, ranks in report.still.items():
            self._taking.still(name, ranks)
        for transfer, generations in report.released.items():
            self._giving.released(transfer, generations)

    @property
    def holding(self) -> bool:
        """Whether blocks are kept of which vLLM knows no request: it must go on making steps, or it will not hear that
        they are free."""
        return self._giving.waiting or self._taking.waiting or bool(self._doomed)

    # --- life ------------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """vLLM drops all KV that it has cached, as is done when weights are changed in place: what was computed before and
        what is computed from now on is not to be mixed, here or between engines. False: it could not, since blocks are in
        use, and is to be asked again, so that this was no change; none will be in use on our account then."""
        reason = "the engine drops its caches, as for other weights"
        for transfer in self._schedule.producer.transfers:
            self._schedule.producer.withdraw(transfer, reason)
        for name in self._loads:
            self._schedule.consumer.finish(name, reason)
        if not self._holds.all_free:
            return False
        self._facts = self._news = updated(self._facts)
        self._directory.identify(self._facts)
        return True

    def bind(self, pool: Any) -> None:
        """``pool``: vLLM's block pool, once it is there."""
        self._holds.bind(pool)

    def publish(self, handshakes: dict[tuple[int, int], Any]) -> None:
        """The workers' agents are up. A sibling connector's metadata is not ours."""
        self._members |= {h.member.cache.rank: h.member for h in handshakes.values() if isinstance(h, Handshake)}
        self._announce()

    def _announce(self) -> None:
        """Let other engines find ours, once all its ranks are known."""
        if len(self._members) == self._world:
            self._directory.publish(tuple(self._members.values()))

    def close(self) -> None:
        self._directory.close()

    def __len__(self) -> int:
        """How much is remembered of requests and transfers; 0 when there are none."""
        kept = (
            self._seen,
            self._offers,
            self._loads,
            self._computed,
            self._tables,
            self._giving,
            self._taking,
            self._holds,
            self._quorum,
        )
        return len(self._schedule) + sum(map(len, kept))


def _table(block_ids: Sequence[Sequence[int]]) -> BlockTable:
    """vLLM's block table with its null block spelt as ours."""
    return BlockTable.of(block_ids, NULL_BLOCK)


def _embeds(tensor: Any, is_token: Sequence[bool] | None) -> bytes:
    """A hash of prompt embeddings, and of which positions they stand for if there are token ids, too."""
    import hashlib

    import torch

    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    mask = b"" if is_token is None else bytes(map(int, is_token))
    return hashlib.blake2b(raw, digest_size=16, key=hashlib.blake2b(mask).digest()).digest()
