"""The scheduler process's part: turns vLLM's scheduler hooks into calls of ``kvxfer.engine.SchedulerSide``.

All methods run on the engine-core thread; none blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.engine import BlockPins, Report, SchedulerSide
from kvxfer.errors import KvxferError
from kvxfer.facts import sealed
from kvxfer.logs import logger
from kvxfer.text import printable
from kvxfer_vllm.arrivals import Arrivals
from kvxfer_vllm.blocks import (
    CachedPrefixes,
    LocalHits,
    PendingFrees,
    PinnedAnswers,
    Room,
    UnfilledBlocks,
    step_tables,
    table_of,
)
from kvxfer_vllm.content import RequestContent
from kvxfer_vllm.content.facts import facts_of, updated
from kvxfer_vllm.internals import EngineLoop, PrefixCache, VllmBlockPool, around_reset, tell_over
from kvxfer_vllm.layout import replicated_ranks
from kvxfer_vllm.metadata import Handshake, ReportMetadata, StepMetadata
from kvxfer_vllm.migration import ConnectorConfig
from kvxfer_vllm.requests import Batches, KnownRequests, RequestFacts, RequestLog
from kvxfer_vllm.settings import EngineSetup
from kvxfer_vllm.stats import CANCELLED, KVXferStats
from kvxfer_vllm.steps import LoadNews, PromptPace, Stopping

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logger("kvxfer.vllm")

FIRST_STEPS = 100
"""The steps that are made without a request until workers have said where they listen, if vLLM does not tell of them all at start."""

WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
"""How a request ends whose KV is good and complete: by a stop token, its length or a repetition, not by an abort, a refusal or an error."""


class SchedulerHooks:
    """One engine's requests, as vLLM tells of them; ``frees`` says whether blocks that are held for others will be free soon."""

    def __init__(self, config: ConnectorConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._setup = setup = EngineSetup(config, vllm_config, kv_cache_config)

        # What is there of vLLM's engine.
        loop = EngineLoop()
        self._cache, self._pins = PrefixCache(), BlockPins(setup.blocks // 4)
        self._requests, self._content = KnownRequests(), RequestContent(vllm_config)
        self._cached = CachedPrefixes(setup.groups, setup.blocks, self._cache, self._content.media.is_ambiguous)

        self.side = SchedulerSide(
            setup.config,
            setup.engine,
            setup.groups,
            setup.ranks,
            facts_of(vllm_config, setup.config),
            pins=self._pins,
            writes_early=setup.writes_early,
            holds=self._cached.holds,
            wake=loop.wake,
            queue=loop.queue(self._requests.unfinished),
        )

        # Blocks.
        self._room, self._unfilled = Room(setup.groups, self._cache), UnfilledBlocks(setup.groups, self._cache)
        self._answers = PinnedAnswers(self._pins, setup.blocks, setup.config.keep_answers)
        self._hits = LocalHits(self.side, self._pins, self._cache, setup.replayed)
        self.frees = PendingFrees()

        # Requests, and what is told of them.
        self._told, self._batches = RequestLog(vllm_config, self.side.takes_no_part), Batches()
        made = self.side, self._hits, self._cached, self._content
        self._arrivals = Arrivals(setup, *made, self._told, self._batches)

        # Steps.
        self._stopping = Stopping(loop, self.side, setup.config.drain, getattr(vllm_config, "shutdown_timeout", 0))
        ahead = max(1, int(getattr(vllm_config, "max_concurrent_batches", 1)))
        self._pace = PromptPace(self.side.takes, vllm_config.scheduler_config.max_num_batched_tokens, ahead)
        self._news = LoadNews(self._requests, self._told, self._cache, setup.block_tokens)
        # How many more steps are made for their sake: nobody finds this engine before its workers are known.
        self._first_steps = FIRST_STEPS if setup.among_several or replicated_ranks(vllm_config) else 0
        self._unplaced = 0  # requests that vLLM has asked about for this step and found no blocks for, so far
        self._holding_back = False  # whether this step gives blocks to nobody

    # --- requests --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> RequestFacts:
        """Return what is known of a request; the first time that we hear of it, learn what it offers or loads."""
        facts, is_new = self._requests.arrive(request)
        if is_new:
            self._arrivals.take_in(facts)
        return facts

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Answer ``get_num_new_matched_tokens``."""
        facts = self.arrive(request)
        if self._holding_back:
            return None, False
        tokens = self._hits.loadable(facts, computed) if self._content.adapters.is_same(facts) else 0
        if tokens is None:
            return None, False
        self._unplaced += 1
        facts.promised = tokens
        if tokens and facts.asking:
            facts.end = computed + tokens
            if facts.since is None:
                self._told.expect(facts, "a prefix", None)
                self._arrivals.hints.loads(request.request_id, facts.kind, tokens, request.num_prompt_tokens)
        beside = bool(tokens) and not self.side.is_prefetched(request.request_id)
        if tokens and beside and self._room.lacks(facts, computed, computed + tokens):
            return None, False
        return tokens, beside

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Handle ``update_state_after_alloc``."""
        name, table = request.request_id, table_of(blocks.get_block_ids())
        facts = self.arrive(request)
        self._unplaced -= 1  # or else the step computes something
        self._room.admitted(facts)
        if external:
            self._unfilled.loads(facts, table, facts.end - external, facts.end)
        if not external or self.side.is_prefetched(name):
            self._told.admitted(facts, external > 0, self.side.failure(name))
            self._unfilled.cached(facts)
        else:
            facts.loading = True
        try:
            self.side.allocated(name, table, external)
        except KvxferError as e:
            # An exception here would end the engine; a load that fails at once costs this request only.
            log.error("request %s cannot be loaded: %s", printable(name), e)
            self._news.refused(name, str(e))

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Record that the request is over. True: its blocks stay until all ranks have reported them quiet."""
        from vllm.v1.request import RequestStatus

        name, whole = request.request_id, request.status.name in WHOLE
        self._arrivals.drop_outdated(self._requests)
        facts, _ = self._requests.arrive(request)
        self._cached.finished(facts)
        self._room.finished(facts)
        self._unfilled.cached(facts)
        self._told.ended(facts, CANCELLED)
        ticket, aborted = self.side.ticket(name), request.status == RequestStatus.FINISHED_ABORTED
        last_of = self._batches.ended(facts)
        answer = self.side.offers.answer(name)
        if whole and facts.answers:
            self._cached.keep_findable(request, facts.unfilled)
            self._answers.pin(facts.number, table_of(block_ids).ids())
        held = self.side.finished(name, table_of(block_ids), whole, good=aborted)
        if facts.loading and self._setup.among_several and not held:
            # vLLM frees its blocks at the end of the load, and again when a sibling lets go of them; so the load, too, counts as keeping.
            held = facts.saves = True
        if aborted and last_of is not None and not request.num_output_tokens:
            # The client has hung up, because a stop string, which ends a request in the same way, needs output. vLLM answers once all
            # have ended, and so nobody hears of those that were done before.
            self.side.offers.unanswered(last_of)
        if held:
            facts.over = True
            self.frees.held(name)
        else:
            self._forget(facts)
        return held, self._arrivals.answer(facts, ticket, answer, whole=whole, held=held, groups=len(block_ids))

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Follow what this step computes, and say what the workers must know with it."""
        self._arrivals.drop_outdated(self._requests)
        self._stopping.look(busy=bool(self._requests))
        self._pace.begins(output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        for name in output.preempted_req_ids or ():
            self.side.preempted(name)
        if self._answers:
            self._answers.unpin_old(self._cache.free)
        idle = not output.total_num_scheduled_tokens
        stuck = idle and self._unplaced > 0
        if output.preempted_req_ids or stuck:
            self.side.short_of_blocks()
        for name, computed, table in step_tables(output, self.side.follows):
            self.side.runs(name, computed, output.num_scheduled_tokens[name], table)
        self.side.stands_still(stuck)
        self._unplaced, self._first_steps, self._holding_back = 0, max(0, self._first_steps - 1), False
        step = self._news.take()
        step.step, step.idle, step.adapters = self.side.step(), idle, dict(self._content.adapters.heard)
        step.waited = idle and step.silent and self.side.loads.wait_alone()
        return step

    def update(self, output: KVConnectorOutput) -> None:
        """Process what the workers have reported: loads that are over, offers that all ranks are done with."""
        self._pace.ended()
        found = output.kv_connector_worker_meta
        ours = found if isinstance(found, ReportMetadata) else ReportMetadata(Report())
        for rank, (replacements, contents) in ours.adapters.items():
            self._content.adapters.learn(rank, contents, replacements)
        self._told.heard(ours.gauges)
        update = self.side.report(ours.report)
        for name in update.free:
            self._let_held_go(name)
        over = set(output.finished_recving or ())  # those that workers were told of, and a sibling's
        for name in over:
            self.side.confirm_load_ended(name)
        tell_over(output, self._news.over(update, over))
        for name in output.finished_sending or ():
            self.side.freed(name)
            self._let_held_go(name)

    def _let_held_go(self, name: str) -> None:
        """Forget a request whose blocks are no longer held for others."""
        facts = self._requests.held(name)
        if facts is not None:
            self.frees.released(name)
            self._forget(facts)
            facts.end_span()

    def _forget(self, facts: RequestFacts) -> None:
        """Forget a request of which nothing is computed or held any more."""
        self._batches.over(facts)
        self._requests.forget(facts)

    def stats(self) -> KVXferStats | None:
        """Return what there is to tell of requests since the last call, if anything."""
        return self._told.stats(self.side)

    @property
    def waiting(self) -> bool:
        """Whether vLLM must go on making steps though it knows no request, or it will not hear what we have to say."""
        self._stopping.look(busy=bool(self._requests))
        unknown = self._first_steps > 0 and not self.side.ready
        return unknown or self.side.waiting or len(self._news) > 0

    # --- life ------------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Record that vLLM drops all KV that it has cached, as is done when weights are changed in place.

        KV computed before and KV computed from now on must not be mixed, here or between engines. Returns False if blocks
        are still in use, so that nothing was dropped: vLLM then calls it again, and the connector holds none by then.
        """
        self._answers.clear()
        if not self.side.withdraw_all("the engine drops its caches, as for other weights"):
            return False
        self._cached.clear(self._requests.all_running())
        self.side.identify(updated(self.side.facts))
        self._arrivals.model = sealed(self.side.facts)
        return True

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool, once it is there."""
        self._pins.bind(VllmBlockPool(pool))

    def bind_cache(self, manager: Any) -> None:
        """Take what knows vLLM's prefix cache, once it is there."""
        self._cache.bind(manager)
        around_reset(manager, self._let_go, self._say_why)

    def _let_go(self) -> None:
        """Let go of what waits for requests, and of what those have offered that vLLM has preempted and not told us of yet.

        That is revoked with the next step only. So where a step writes early, nobody is given blocks in that one.
        """
        self.side.short_of_blocks()
        self._answers.clear()
        for facts in self._requests.all_running():
            if self.side.follows(facts.name) and not any(self._cache.table(facts.name)):
                self.side.preempted(facts.name)
        self._holding_back = self._setup.writes_early

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
        return len(self._requests) + len(self._news) + len(self._batches) + len(self.side)
