"""The scheduler process's part: turns vLLM's scheduler hooks into calls of ``kvxfer.engine.SchedulerSide``.

All methods run on the engine-core thread; none blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from kvxfer.engine import BlockPins, EngineQueue, Prefix, Report, SchedulerSide, Ticket
from kvxfer.errors import KvxferError
from kvxfer.facts import sealed
from kvxfer.failures import FailureKind
from kvxfer.identity import Address, Source
from kvxfer.logs import logger
from kvxfer.text import printable
from kvxfer.values import BlockTable
from kvxfer_vllm import compat
from kvxfer_vllm import params as p
from kvxfer_vllm.adapters import UnknownAdapterError
from kvxfer_vllm.batches import Batches, spread_over_ranks
from kvxfer_vllm.common import CommonPart, common_part
from kvxfer_vllm.content import RequestContent
from kvxfer_vllm.enclosing import enclosed, engine_transfer, loads_safely
from kvxfer_vllm.frees import PendingFrees
from kvxfer_vllm.held import HeldPrefixes
from kvxfer_vllm.hints import HintNotes, Hints
from kvxfer_vllm.identity import facts_of, updated
from kvxfer_vllm.ids import ExternalId, external_id, may_be_of_batch
from kvxfer_vllm.kept import KeptAnswers
from kvxfer_vllm.metadata import Handshake, ReportMetadata, StepMetadata
from kvxfer_vllm.migration import ConnectorConfig, params_of
from kvxfer_vllm.no_part import NoPart
from kvxfer_vllm.pages import replays
from kvxfer_vllm.pool import VllmBlockPool
from kvxfer_vllm.prefix_metrics import PrefixNews
from kvxfer_vllm.prompt_pace import PromptPace
from kvxfer_vllm.recurrent import leave_last_token
from kvxfer_vllm.requests import LoadOutcomes, RequestFacts
from kvxfer_vllm.retained import RetainedBlocks
from kvxfer_vllm.room import Room
from kvxfer_vllm.schemas import translated
from kvxfer_vllm.settings import groups_of
from kvxfer_vllm.stats import CANCELLED, COMPUTED, DELIVERED, ELSEWHERE, KVXferStats, Reason
from kvxfer_vllm.tracing import OFFER, RequestSpans
from kvxfer_vllm.wake import EngineLoop

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerHooks"]

log = logger("kvxfer.vllm")

NULL_BLOCK = 0
"""vLLM's block 0 stands for "no block"; it never holds data."""

FIRST_STEPS = 100
"""The steps that are made without a request, inside MultiConnector, until the workers have said where they listen."""

WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
"""How a request ends whose KV is good and complete: by a stop token, by its length, or because it repeats itself. Not those that vLLM
has aborted, refused as too long or ended after an error."""


class SchedulerHooks:
    """One engine's requests, as vLLM tells of them."""

    def __init__(self, config: ConnectorConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        assert transfer is not None
        self._produces, self._consumes = transfer.is_kv_producer, loads_safely(vllm_config)
        self._engine, self._tp = str(transfer.engine_id), parallel.tensor_parallel_size
        config = enclosed(config, vllm_config)
        # Inside MultiConnector workers may say only with a step where they listen. Until then nobody finds this engine.
        self._first_steps = 0 if engine_transfer(vllm_config) is transfer else FIRST_STEPS
        self._content, self._warned = RequestContent(vllm_config), set[str]()
        groups = groups_of(kv_cache_config, vllm_config)
        # vLLM goes on behind the blocks of a load that are good where a table is of one row.
        self._partly = len(groups) == 1 and groups[0].kind == "full"
        self._block_tokens = groups[0].block_tokens
        self._recurrent = any(group.kind == "state" for group in groups)
        replayed = (replays(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
        self._replayed = tuple(itertools.compress(groups, replayed))
        self._pins, self._room = BlockPins(kv_cache_config.num_blocks // 4), Room(groups)
        self._retained = RetainedBlocks(groups)
        self._kept = KeptAnswers(self._pins, kv_cache_config.num_blocks, config.keep_answers)
        facts = facts_of(vllm_config, config)
        # Model runner 2 zeroes such a cache's new blocks, or copies states into them, before it calls ``handle_preemptions``. Model
        # runner 1 calls that first, and in any other cache both write to new blocks in the forward pass only, which comes later.
        self._writes_early = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        self._cached = HeldPrefixes(groups, kv_cache_config.num_blocks, NULL_BLOCK)
        loop = EngineLoop()
        arriving = loop.arriving if compat.TELLS_ARRIVALS else None
        queue = None if arriving is None else EngineQueue(lambda: len(self._requests), arriving)
        self.side = SchedulerSide(
            config,
            self._engine,
            groups,
            parallel.world_size,
            facts,
            pins=self._pins,
            writes_early=self._writes_early,
            holds=self._cached.holds,
            wake=loop.waker,
            queue=queue,
        )
        self._facts = sealed(self.side.facts)
        self._hints, self._news = HintNotes(), PrefixNews()
        ahead = max(1, int(getattr(vllm_config, "max_concurrent_batches", 1)))
        self._pace = PromptPace(self.side.takes, vllm_config.scheduler_config.max_num_batched_tokens, ahead)
        self._requests: dict[str, RequestFacts] = {}  # by name, until they are over
        self._held: dict[str, RequestFacts] = {}  # those that are over, and whose blocks are held for others
        self._frees = PendingFrees()
        self._numbers = itertools.count()
        self._spans = RequestSpans(vllm_config)
        self._outcomes = LoadOutcomes(self._spans)
        self._batches, self._spread = Batches(), spread_over_ranks(self._engine, parallel)
        self._no_part = NoPart(self._outcomes, self.side.takes_no_part)
        self._next = StepMetadata()  # what vLLM is to be told with the next step
        self._unplaced = 0  # requests that vLLM has asked about for this step and found no blocks for
        self._steps = 1
        self._holding_back = False  # whether this step gives blocks to nobody
        self._manager: Any = None
        self._hits: Callable[[Request], int] | None = None  # how much of a prompt is cached here

    # --- requests --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Learn what a request offers or loads, the first time that we hear of it. What it is found to be it stays."""
        name = request.request_id
        if name in self._requests:
            return
        self._requests[name] = RequestFacts(name, next(self._numbers))
        self._content.arrived(request)
        said: Mapping[str, Any] = request.kv_transfer_params or {}
        params: Mapping[str, Any] = {}
        try:
            params = translated(said or self._legacy(request) or {})
            if params:
                self._take_up(request, params)
        except UnknownAdapterError as e:
            self._takes_no_part(params, Reason.ADAPTER)
            (log.debug if e.adapter in self._warned else log.warning)("%s", e)
            self._warned.add(e.adapter)
        except KvxferError as e:  # an id or a prompt that cannot be named: no transfer, the request goes on
            self._takes_no_part(params, Reason.INVALID)
            log.warning("request %s takes no part in KV transfer: %s", printable(request.request_id), e)
            self.side.takes_no_part(name, f"it takes no part in KV transfer: {e}")
        self._follow_prefix(request, said, params)

    def _follow_prefix(self, request: Request, said: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        """Let other engines find what is computed for a request, and look for a prefix of it at those that its router names."""
        name, facts = request.request_id, self._requests[request.request_id]
        facts.answers = bool(params) and not p.is_offer(params) and self._config.decode_answers
        hints = self._hints.read(said)
        try:
            named = self._content.named(request)
            if named is None:
                return
            self._cached.arrived(request, lambda tokens: Prefix(tokens, model=self._facts, **named))
            if hints.sources and not p.is_load(params) and not self._replayed and not request.skip_reading_prefix_cache:
                self._ask(request, Prefix(request.prompt_token_ids or (), model=self._facts, **named), hints)
        except KvxferError as e:
            log.debug("request %s is not looked for at other engines, nor found by them: %s", printable(name), e)

    def _ask(self, request: Request, prompt: Prefix, hints: Hints) -> None:
        if not self._consumes:
            self._hints.unused(
                hints.kind, "asks this engine to load a prefix, which its kv_role does not allow: set kv_both"
            )
            return
        sources = [Source(where.host, where.port, 0) for where in hints.sources]
        if self.side.ask(request.request_id, prompt, sources, request.num_prompt_tokens - 1, kind=hints.kind):
            facts = self._requests[request.request_id]
            facts.asking, facts.kind = request, hints.kind

    def _takes_no_part(self, params: Mapping[str, Any], reason: Reason) -> None:
        if self._produces and p.is_offer(params):
            self._no_part.count(reason)

    def _legacy(self, request: Request) -> dict[str, Any] | None:
        """Params out of a request id in the form of P2pNcclConnector, where the configuration allows that."""
        hosts = self._config.legacy_hosts
        if not hosts:
            return None
        own = Address(self.side.source.host, self.side.source.port)
        return params_of(
            external_id(request.request_id), produces=self._produces, consumes=self._consumes, own=own, hosts=hosts
        )

    def _take_up(self, request: Request, params: Mapping[str, Any]) -> None:
        name, whole = request.request_id, request.num_prompt_tokens
        offers = self._produces and p.is_offer(params)
        loads = p.is_given_up(params, whole) or (self._consumes and p.is_load(params))
        if not offers and not loads:
            if (why := p.wrong_role(params)) is not None:
                log.warning("request %s %s", printable(name), why)
                self.side.takes_no_part(name, f"it {why}")
            elif self._consumes and p.says_nothing(params):
                self._no_part.not_loaded(name, Reason.PARAMS, p.NO_VERB)
            if p.is_offer(params):
                self._no_part.count(Reason.WRONG_ROLE)
            return
        external, content = external_id(name), self._digest(request)  # of the whole prompt, before it may be cut
        if offers:
            self._offer(request, params, external, content)
        if loads:
            # The last prompt token is computed here in any case, so its KV need not come. An engine that offers a state computes the one
            # before it, too, and of the tokens before both P has no state.
            part = common_part(
                p.told_of(params, external),
                self._facts,
                whole=whole,
                most=request.num_prompt_tokens - 1,
                left=int(self._recurrent),
                content=content,
                digest=lambda tokens: self._digest(request, tokens),
            )
            self._load(request, params, external, part)

    def _offer(self, request: Request, params: Mapping[str, Any], external: ExternalId, content: bytes) -> None:
        """Offer a prompt to other engines, or say why not."""
        name = request.request_id
        transfer = p.offered_id(params, self.side.source.epoch, external, content)
        if request.resumable:
            why = "vLLM tells nobody of it, because more of its prompt may come (streaming input)"
            self._no_part.not_offered(name, Reason.STREAMING_INPUT, why)
            return
        if self._spread and (external.prompt or external.child is not None):
            # The answer will tell of one of them, and that is offered by one rank.
            why = "vLLM spreads the prompts and samples of one HTTP request over its data-parallel ranks; send prefill one of them"
            self._no_part.not_offered(name, Reason.DATA_PARALLEL, why)
            return
        if request.num_prompt_tokens < 1 + self._recurrent:
            # There is no state before its only token, or no token. Of a batch, vLLM relays the params of the first prompt, even if
            # that is this one.
            if may_be_of_batch(name):
                self._requests[name].nothing = Ticket(transfer, content, self.side.source)
            self._no_part.not_offered(
                name, Reason.NOTHING, "its prompt is too short to leave any KV or state for another engine"
            )
            return
        if self._recurrent:  # not before it is known that there will be an offer
            leave_last_token(request)
        # All requests for which a router has one name have one answer, too.
        answer = (
            str(transfer)
            if p.is_routed(params)
            else self._batches.answer(self._requests[name], external, request.arrival_time)
        )
        tokens, stops = request.num_prompt_tokens, request.max_tokens == 1
        if not self.side.offer(name, transfer, content, tokens, stops=stops, answer=answer):
            why = f"{printable(transfer)} is offered with other content, or its last offer is just ending"
            self._no_part.not_offered(name, Reason.OTHER_CONTENT, why)

    def _load(self, request: Request, params: Mapping[str, Any], external: ExternalId, part: CommonPart) -> None:
        """Load this part of a prompt from where the params say, unless that is known to be in vain."""
        name, want = request.request_id, p.wanted(params, external, part.digest)
        if isinstance(want, str):
            self._no_part.not_loaded(name, Reason.PARAMS, want)
            return
        transfer, source = want
        facts = self._requests[name]
        if part.rejected:
            self.side.decline(transfer, part.digest, source, p.answer_of(params) or "")
            self._outcomes.expect(facts, request, str(transfer), None)
            return
        key, answered = p.offer_key(params, transfer), p.is_answer(params)  # else P may not have begun
        if key in self._outcomes.used:
            log.info("request %s is computed here: an earlier one has used the offer of its params", printable(name))
            self.side.takes_no_part(name, "it is computed here: an earlier request has used the offer of its params")
            self._outcomes.expect(facts, request, str(transfer), None)
            self._outcomes.ended(facts, COMPUTED)
            return
        enough = min(self._block_tokens, part.tokens) if self._partly and not answered else 0
        what = name, transfer, part.digest, source, part.tokens
        took = self.side.load(*what, begun=answered, offered=answered, enough=enough, answer=p.answer_of(params))
        self._outcomes.expect(facts, request, str(transfer), key if took else None)
        facts.end = part.tokens
        if part.differs:
            log.warning(
                "request %s is computed here: its prompt does not begin with that of its params", printable(name)
            )
            self.side.takes_no_part(name, "it is computed here: its prompt does not begin with that of its params")
            self._outcomes.ended(facts, str(FailureKind.DIGEST_DIFFERS))
        if self._hits is not None and not self._replayed and not request.skip_reading_prefix_cache:
            # Not later: vLLM looks up what it has of a prompt, then asks us, then takes its blocks; none of those may be lent.
            self.side.prefetch(name, self._hits(request))

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Answer ``get_num_new_matched_tokens``."""
        self.arrive(request)
        facts = self._requests[request.request_id]
        if self._holding_back:
            return None, False
        if request.skip_reading_prefix_cache:  # it needs its whole prompt computed; vLLM before 0.31 leaves that to us
            self._asked(facts)
            return 0, False
        if not self._content.adapters.is_same(request.request_id) or self._lacks_window(facts, computed):
            self._asked(facts)
            return 0, False
        tokens = self.side.loadable(request.request_id, computed)
        facts.promised = tokens or 0
        if tokens is not None:
            self._asked(facts)
        if tokens and facts.asking is not None:
            facts.end = computed + tokens
            if facts.since is None:
                self._outcomes.expect(facts, request, "a prefix", None)
                self._hints.loads(request.request_id, facts.kind, tokens, request.num_prompt_tokens)
        beside = bool(tokens) and not self.side.is_prefetched(request.request_id)
        if tokens and beside and self._room.lacks(facts, computed, computed + tokens):
            return None, False
        return tokens, beside

    def _asked(self, facts: RequestFacts) -> None:
        """Record that vLLM looks for blocks for a request in this step, unless ``allocated`` follows."""
        if facts.asked_in != self._steps:
            facts.asked_in, self._unplaced = self._steps, self._unplaced + 1

    def _lacks_window(self, facts: RequestFacts, computed: int) -> bool:
        """Return whether a load would not bring the whole of a window of which nothing is kept for prefix hits, as it begins behind one.

        There are then fewer tokens to compute than a window has. With them, vLLM computes the window again.
        """
        return computed > 0 and any(computed > group.behind(facts.end) for group in self._replayed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Handle ``update_state_after_alloc``."""
        name, table = request.request_id, _table(blocks.get_block_ids())
        facts = self._requests[name]
        if facts.asked_in == self._steps:
            facts.asked_in, self._unplaced = 0, self._unplaced - 1
        self._room.admitted(facts)
        if external:
            facts.into = table if self._partly and facts.asking is None else None
            if facts.asking is not None and not self.side.is_prefetched(name):
                self._next.asked += (name,)
            self._retained.loads(facts, table, facts.end - external, facts.end)
        if not external or self.side.is_prefetched(name):
            self._outcomes.ended(facts, DELIVERED if external else ELSEWHERE if facts.promised else COMPUTED)
            self._retained.cached(facts)
        try:
            self.side.allocated(name, table, external)
        except KvxferError as e:
            # An exception here would end the engine; a load that fails at once costs this request only.
            log.error("request %s cannot be loaded: %s", printable(name), e)
            self._next.doomed[name] = table.ids()
            self._outcomes.ended(facts, str(FailureKind.MISUSE))

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Record that the request is over. True: its blocks stay until all ranks have reported them quiet."""
        from vllm.v1.request import RequestStatus

        name = request.request_id
        whole = request.status.name in WHOLE
        self._drop_outdated()
        self._cached.finished(name, good=self._content.adapters.is_same(name))
        self._content.finished(name)
        facts = self._requests.pop(name, None) or RequestFacts(name, next(self._numbers))
        self._room.finished(facts)
        self._retained.cached(facts)
        self._outcomes.ended(facts, CANCELLED)
        ticket, aborted = self.side.ticket(name), request.status == RequestStatus.FINISHED_ABORTED
        last_of = self._batches.ended(facts)
        answer = self.side.answer(name)
        if whole and facts.answers:
            self._cached.keep_findable(request)
            self._kept.keep(name, _table(block_ids).ids())
        held = self.side.finished(name, _table(block_ids), whole, good=aborted)
        if aborted and last_of is not None and not request.num_output_tokens:
            # The client has hung up, because a stop string, which ends a request in the same way, needs output. vLLM answers once all
            # have ended, and so nobody hears of those that were done before.
            self.side.unanswered(last_of)
        if held:
            self._held[name] = facts
            self._frees.held(name)
        else:
            self._batches.over(facts)
        if ticket is None or not self.side.offers(ticket):
            if ticket is not None and whole:
                why = f"{printable(ticket.transfer)} is given up, as the line of its withdrawal explains"
                self._no_part.not_offered(name, Reason.GIVEN_UP, why)
            ticket = facts.nothing if whole else None
        if ticket is None:
            return held, self._held_answer(request, len(block_ids)) if whole and facts.answers else None
        if held:
            facts.span = self._spans.begin(OFFER, request, str(ticket.transfer))
        sizes = self._tp, len(block_ids), request.num_prompt_tokens
        return held, p.answer(ticket, self._engine, answer, *sizes, self._facts, self._spread)

    def _held_answer(self, request: Request, groups: int) -> dict[str, Any]:
        return p.held_answer(
            self.side.source, self._engine, request.request_id, self._tp, groups, request.num_computed_tokens
        )

    def _digest(self, request: Request, tokens: int | None = None) -> bytes:
        """Return the digest of the prompt, or of its first ``tokens`` tokens, with whatever media begin among them."""
        return self._content.digest(request, self._facts, tokens)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Follow what this step computes, and say what the workers must know with it."""
        self._drop_outdated()
        self._pace.begins(output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        for name in output.preempted_req_ids or ():
            self.side.preempted(name)
        if self._kept:
            self._kept.give_back(self._manager.block_pool.get_num_free_blocks())
        idle = not output.total_num_scheduled_tokens
        stuck = bool(self._unplaced) and idle
        if output.preempted_req_ids or stuck:
            self.side.short_of_blocks()
        self._follow(output)
        self.side.stands_still(stuck)
        self._unplaced, self._steps = 0, self._steps + 1
        step, self._next = self._next, StepMetadata()
        step.step, step.idle = self.side.step(), idle
        if idle and step.silent:
            step.waited = self.side.wait_alone()
        self._holding_back = False
        return step

    def _drop_outdated(self) -> None:
        """Offer nothing of requests whose adapter was replaced on the way: a part may be computed with the weights of before."""
        for name in self._content.adapters.take_outdated():
            if self.side.ticket(name) is not None:
                self._no_part.count(Reason.ADAPTER)
            self.side.withdraw(name, "its adapter was loaded again with other weights")

    def _follow(self, output: SchedulerOutput) -> None:
        state = getattr(output, "kv_connector_block_state", None)
        whole = getattr(state, "get_block_ids", None)
        cached = output.scheduled_cached_reqs
        seen: list[tuple[str, int]] = []
        for new in output.scheduled_new_reqs:
            if self.side.follows(new.req_id):
                self._requests[new.req_id].table = [list(row) for row in new.block_ids]
                seen.append((new.req_id, new.num_computed_tokens))
        for i, name in enumerate(cached.req_ids):
            if self.side.follows(name):
                self._grow(self._requests[name], cached.new_block_ids[i], name in cached.resumed_req_ids)
                seen.append((name, cached.num_computed_tokens[i]))
            elif name in self._requests:
                self._requests[name].table = None
        for name, computed in seen:
            table = whole(name) if whole is not None else None
            rows = _table(table if table is not None else self._requests[name].table or ())
            self.side.runs(name, computed, output.num_scheduled_tokens[name], rows)

    @staticmethod
    def _grow(facts: RequestFacts, new: Sequence[Sequence[int]] | None, resumed: bool) -> None:
        """Append new blocks; those of a resumed request replace its table."""
        if resumed and new is not None:
            facts.table = [list(row) for row in new]
        elif new is not None and facts.table is not None:
            for row, more in zip(facts.table, new, strict=True):
                row.extend(more)

    def update(self, output: KVConnectorOutput) -> None:
        """Process what the workers have reported: loads that are over, offers that all ranks are done with."""
        self._pace.ended()
        found = output.kv_connector_worker_meta
        over = set(output.finished_recving or ())
        ours = found if isinstance(found, ReportMetadata) else ReportMetadata(Report())
        for rank, contents in ours.adapters.items():
            self._content.adapters.learn(rank, contents)
        update = self.side.report(ours.report)
        self._next.freed += tuple(update.free)
        for name in update.free:
            self._let_held_go(name)
        ends = {name: str(failure.kind) for name, failure in update.failed.items()} | dict.fromkeys(
            update.loaded, DELIVERED
        )
        for name, outcome in ends.items():
            facts = self._requests.get(name)
            if facts is None:
                continue
            self._outcomes.ended(facts, outcome)
            if name in update.disagreed:
                self._next.doomed[name] = update.disagreed[name]
            elif name in update.short and facts.into is not None:
                self._next.partial[name] = tuple(facts.into[0][update.short[name] // self._block_tokens :].tolist())
            facts.into, facts.lost = None, name in update.failed
        for name in over:
            self.side.confirm_load_ended(name)
            facts = self._requests.get(name)
            self._outcomes.ended(facts, DELIVERED)
            if facts is not None and facts.asking is not None and facts.lost:
                compat.compute_anew(self._manager, facts.asking)
        # What only we know to be wrong with a load vLLM hears of with the next step, from our workers. What the side channel has
        # said vLLM hears now, and not again when a step says so, too.
        wrong = self._next.doomed.keys() & update.disagreed.keys() | self._next.partial.keys() & update.short.keys()
        compat.correct(output, over=update.loaded - over - wrong, still=wrong | (update.repeated & over))
        for name in output.finished_sending or ():
            self.side.freed(name)
            self._let_held_go(name)

    def _let_held_go(self, name: str) -> None:
        """Forget a request whose blocks are no longer held for others."""
        facts = self._held.pop(name, None)
        if facts is not None:
            self._frees.released(name)
            self._batches.over(facts)
            facts.end_span()

    def stats(self) -> KVXferStats | None:
        """Return what there is to tell of requests since the last call, if anything."""
        self._outcomes.prefixes(self._news.take(self.side.asked, self.side.answered))
        return self._outcomes.stats()

    @property
    def frees_soon(self) -> bool:
        """Whether vLLM should wait for blocks that are held for others, rather than preempt a request."""
        return self._frees.soon()

    @property
    def waiting(self) -> bool:
        """Whether vLLM must go on making steps though it knows no request, or it will not hear what we have to say."""
        unknown = self._steps < self._first_steps and not self.side.ready
        return unknown or self.side.waiting or bool(self._next.doomed or self._next.partial)

    # --- life ------------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Record that vLLM drops all KV that it has cached, as is done when weights are changed in place.

        KV computed before and KV computed from now on must not be mixed, here or between engines. Returns False if blocks
        are still in use, so that nothing was dropped: vLLM then calls it again, and the connector holds none by then.
        """
        self._kept.clear()
        if not self.side.withdraw_all("the engine drops its caches, as for other weights"):
            return False
        self._cached.clear()
        self.side.identify(updated(self.side.facts))
        self._facts = sealed(self.side.facts)
        return True

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool, once it is there."""
        self._pins.bind(VllmBlockPool(pool))

    def bind_cache(self, manager: Any) -> None:
        """Take what knows vLLM's prefix cache, once it is there (0.30 and later)."""
        self._hits = lambda request: manager.get_computed_blocks(request)[1]
        self._manager = manager
        self._cached.bind(manager)
        self._room.bind(manager)
        self._retained.bind(manager)
        compat.around_reset(manager, lambda: self._let_go(manager), self._say_why)

    def _let_go(self, manager: Any) -> None:
        """Let go of what waits for requests, and of what those have offered that vLLM has preempted and not told us of yet.

        That is revoked with the next step only. So where a step writes early, nobody is given blocks in that one.
        """
        self.side.short_of_blocks()
        self._kept.clear()
        for name in self._requests:
            if self.side.follows(name) and not any(manager.get_block_ids(name)):
                self.side.preempted(name)
        self._holding_back = self._writes_early

    def _say_why(self) -> None:
        """Say why vLLM cannot clear its cache, which it puts down to requests, if it is on account of what we have pinned."""
        if self._pins:
            log.warning(
                "the cache cannot be cleared now: transfers may still touch some of its blocks; pause this engine and ask again"
            )

    def publish(self, handshakes: dict[tuple[int, int], Any]) -> None:
        """Record that the workers' agents are up. A sibling connector's metadata is not ours."""
        ours = [h for h in handshakes.values() if isinstance(h, Handshake)]
        self.side.listen_to({h.descriptor.cache.rank: h.channel for h in ours if h.channel is not None})
        self.side.announce(h.descriptor for h in ours)

    def close(self) -> None:
        """Stop serving the directory."""
        self.side.close()

    def __len__(self) -> int:
        """Return how much is remembered of requests and transfers; 0 when there are none."""
        ours: tuple[Sized, ...] = (
            self._requests,
            self._next.partial,
            self._content,
            self._batches,
            self._held,
            self._cached,
            self.side,
        )
        return sum(map(len, ours))


def _table(block_ids: Sequence[Sequence[int]]) -> BlockTable:
    """Return vLLM's block table with its null block spelt as ours."""
    return BlockTable.of(block_ids, NULL_BLOCK)
