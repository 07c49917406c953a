"""What the scheduler's process keeps of each of vLLM's requests, and what it tells of them: outcomes, spans, and why one takes no part."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer import clock
from kvxfer.engine import Prefix, SchedulerSide, Ticket
from kvxfer.failures import Failure
from kvxfer.failures import FailureKind as K
from kvxfer.logs import logger
from kvxfer.protocol.timers import Recent
from kvxfer.security import Repeats
from kvxfer.text import printable
from kvxfer_vllm.said import ExternalId
from kvxfer_vllm.stats import CANCELLED, COMPUTED, DELIVERED, ELSEWHERE, KVXferStats, PrefixNews, RankGauges, Reason

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

log = logger("kvxfer.vllm")

LOAD, OFFER = "kvxfer.load", "kvxfer.offer"
"""A load's span lasts from the request's arrival until its KV is here or will not come; an offer's from the request's end until other
engines have fetched its KV or will not fetch it."""


class RequestSpans:
    """Opens spans; one thread. A request that came without a trace has no span."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._tracer: Any = None
        settings = getattr(vllm_config, "observability_config", None)
        if getattr(settings, "otlp_traces_endpoint", None) is not None:
            from opentelemetry import trace  # vLLM refuses an endpoint if this is not installed

            self._tracer = trace.get_tracer("kvxfer")  # uses the provider that vLLM has set, or will set

    def begin(self, name: str, request: Request, transfer: str) -> Any:
        """Open and return a span of this name for a request; None if it has none."""
        headers = getattr(request, "trace_headers", None)
        if self._tracer is None or not headers:
            return None
        from vllm.tracing import extract_trace_context

        attributes = {"kvxfer.request": request.request_id, "kvxfer.transfer": transfer}
        context = extract_trace_context(headers)
        return self._tracer.start_span(name, context=context, attributes=attributes)


GONE = {
    *(DELIVERED, COMPUTED, ELSEWHERE, CANCELLED),
    *map(str, (K.NEVER_OFFERED, K.WITHDRAWN, K.DIGEST_DIFFERS, K.NO_SUCH_ENGINE)),
}
"""The outcomes after which the producer does not offer it any more."""


MAX_USED = 1 << 16
"""The most that is remembered as used; the oldest is forgotten first."""

Naming = Callable[[Sequence[int]], Prefix]
"""Names first tokens of a request by content. It is given an array, in which a token takes 4 bytes until it is hashed."""


@dataclass(slots=True, eq=False)
class HttpBatch:
    """The prompts of one HTTP request, as far as is known."""

    answer: str  # the name of its answer
    base: str  # the id that its prompts have in common
    arrived: float  # when it came
    prompts: dict[int, str] = field(default_factory=dict)  # by position, the name that vLLM has given to a prompt
    requests: set[str] = field(default_factory=set)  # those of which something is computed or held
    running: set[str] = field(default_factory=set)  # the ones among them that have not ended


@dataclass(slots=True, eq=False)
class RequestFacts:
    """One request, from its arrival until vLLM says that it is over, or until its blocks are no longer held for others."""

    name: str  # vLLM's id of it
    number: int  # requests count up in the order of their arrival
    request: Any = None
    earlier: RequestFacts | None = None  # a request of this name that is over and whose blocks are held
    over: bool = False  # and its blocks are held for others
    salt: str | None = None  # the cache salt that it came with
    reloaded: bool = False  # whether vLLM caches it under another salt, because its adapter had been loaded again
    adapter: tuple[int, int] | None = None  # its number, and how often that had been replaced when the request came
    naming: Naming | None = None  # names its first tokens by content, until it is over
    nothing: Ticket | None = None  # what is told of it although it has nothing to offer
    unmoved: str | None = None  # why nobody may compute on from its KV, nor it on others'
    refused: str | None = None  # why it computes its whole prompt
    loading: bool = False  # whether vLLM waits for the end of its load
    saves: bool = False  # it is over while it loads, and beside it other connectors may keep its blocks
    promised: int = 0  # how many tokens vLLM was last told that it can load
    end: int = 0  # up to which token its load is to bring its prompt
    # blocks of its load that begin behind a window, and may be left unfilled
    behind: set[int] = field(default_factory=set)
    unfilled: set[int] = field(default_factory=set)  # those of them that have been taken out of the prefix cache
    since: float | None = None  # when it came, if it is not known yet what becomes of its load
    key: bytes | None = None  # the key of the offer that its load takes
    passers: set[str] | None = None  # the names of those that have passed its load, which is skipped for want of room
    kind: str = ""  # who has named the engines that are asked for a prefix: a router's schema; empty if none are
    answers: bool = False  # whether its router is told, when it ends, where the KV is
    batch: HttpBatch | None = None  # the HTTP request that it belongs to, if it offers
    span: Any = None  # the span of its load, and later the span of its offer

    @property
    def asking(self) -> bool:
        """Whether other engines are asked for a prefix. What they hold fails no request, whatever vLLM's policy."""
        return bool(self.kind)

    def end_span(self, outcome: str | None = None) -> None:
        """Close its span, if one is open."""
        span, self.span = self.span, None
        if span is not None:
            if outcome is not None:
                span.set_attribute("kvxfer.outcome", outcome)
            span.end()


class KnownRequests:
    """The requests of one engine by name: those that run, and those that are over while their blocks are held. One thread."""

    def __init__(self) -> None:
        # Of each name; the one before it, if that is still there, is its ``earlier``.
        self._last: dict[str, RequestFacts] = {}
        self._numbers = itertools.count()

    def arrive(self, request: Request) -> tuple[RequestFacts, bool]:
        """Return what is known of a request that is not over, and whether it is new."""
        known = self._last.get(request.request_id)
        if known is not None and not known.over:
            return known, False
        facts = RequestFacts(request.request_id, next(self._numbers), request, known, salt=request.cache_salt)
        self._last[facts.name] = facts
        return facts, True

    def last(self, name: str) -> RequestFacts | None:
        """Return the last request of a name, over or not."""
        return self._last.get(name)

    def running(self, name: str) -> RequestFacts | None:
        """Return the request of a name that is not over."""
        facts = self._last.get(name)
        return None if facts is None or facts.over else facts

    def held(self, name: str) -> RequestFacts | None:
        """Return the request of a name that is over, and whose blocks are held."""
        last = self._last.get(name)
        return last if last is None or last.over else last.earlier

    def all_running(self) -> list[RequestFacts]:
        """Return those that are not over."""
        return [facts for facts in self._last.values() if not facts.over]

    def unfinished(self) -> int:
        """Return how many are not over."""
        return len(self.all_running())

    def forget(self, facts: RequestFacts) -> None:
        """Forget a request of which nothing is computed or held any more."""
        last = self._last.get(facts.name)
        if last is not None and last is not facts:
            last.earlier = None
        elif facts.earlier is not None:
            self._last[facts.name] = facts.earlier
        else:
            self._last.pop(facts.name, None)

    def __len__(self) -> int:
        """Return how many names are in use."""
        return len(self._last)


class Batches:
    """The HTTP requests of which something is computed or held here. One thread."""

    def __init__(self) -> None:
        self._by_id: defaultdict[str, list[HttpBatch]] = defaultdict(list)

    def answer(self, facts: RequestFacts, external: ExternalId, arrived: float) -> str:
        """Take in a request that offers, and return the name of the answer that will tell of it.

        Clients send one id for several requests. vLLM's front end notes one time of arrival for all prompts of an HTTP request,
        which tells them apart. Where it is unclear all the same to which of them a prompt belongs, it has an answer of its own.
        """
        request = facts.name
        prompt = request if external.child is None else request.partition("_")[2]
        known = self._by_id[external.base]
        fitting = [batch for batch in known if batch.prompts.get(external.prompt, prompt) == prompt]
        fitting = [batch for batch in fitting if batch.arrived == arrived] or fitting
        if len(fitting) == 1:
            (batch,) = fitting
        else:
            known.append(batch := HttpBatch(prompt, external.base, arrived))
        batch.prompts[external.prompt] = prompt
        batch.requests.add(request)
        batch.running.add(request)
        facts.batch = batch
        return batch.answer

    def ended(self, facts: RequestFacts) -> str | None:
        """Record that a request has ended; return the name of its answer if all others that this tells of had ended before it."""
        batch = facts.batch
        if batch is None:
            return None
        batch.running.discard(facts.name)
        return None if batch.running or len(batch.requests) == 1 else batch.answer

    def over(self, facts: RequestFacts) -> None:
        """Record that nothing is computed or held for a request any more."""
        batch, facts.batch = facts.batch, None
        if batch is None:
            return
        batch.requests.remove(facts.name)
        if not batch.requests:
            self._by_id[batch.base].remove(batch)
            if not self._by_id[batch.base]:
                del self._by_id[batch.base]

    def __len__(self) -> int:
        """Return of how many HTTP requests something is computed or held."""
        return sum(map(len, self._by_id.values()))


EVERY_S = 10.0
"""Seconds from one log line of a reason to the next."""


class RequestLog:
    """What is told of an engine's requests: counts, spans, and lines of the log. One thread.

    Args:
        vllm_config: vLLM's.
        remember: Called with a request that takes no part in a transfer, and why.

    Attributes:
        used: What can be had once. The keys (``Said.offer_key``) of the offers that such requests have had: a front end may call its
            engine several times under the params of one answer, after a tool, say, or for a retry. And what was offered for an HTTP
            request, which may have several requests: the transfer and the time of arrival.
        counts: What there is to tell since ``stats`` was called last.
    """

    def __init__(self, vllm_config: VllmConfig, remember: Callable[[str, str], None]) -> None:
        self._spans, self._remember, self._repeats = RequestSpans(vllm_config), remember, Repeats(EVERY_S)
        self._news, self._gauges = PrefixNews(), RankGauges()
        self.counts = KVXferStats()
        self.used: Recent[Hashable, bool] = Recent(math.inf, MAX_USED)

    # --- loads and offers ----------------------------------------------------------------------------------------------

    def expect(self, facts: RequestFacts, transfer: str, key: bytes | None) -> None:
        """Record that a request has come whose KV is to be loaded, and the key of the offer that this takes, if it has one."""
        if getattr(facts.request, "abort_immediately", False):
            return  # vLLM's front end makes one up, for a request that it has refused or whose client is gone
        facts.since, facts.key = clock.now(), key
        facts.span = self._spans.begin(LOAD, facts.request, transfer)

    def admitted(self, facts: RequestFacts, loaded: bool, failure: Failure | None) -> None:
        """Record that a request has blocks and waits for no load: all of that is here, or it computes the tokens."""
        computed = ELSEWHERE if facts.promised else COMPUTED if failure is None else str(failure.kind)
        self.ended(facts, DELIVERED if loaded else computed)

    def ended(self, facts: RequestFacts, outcome: str) -> None:
        """Process what has become of its load; the first word of a request counts, and what follows changes nothing."""
        if facts.since is None:
            return
        self.counts.request(outcome, clock.now() - facts.since)
        facts.end_span(outcome)
        if facts.key is not None and outcome in GONE:
            self.used.put(facts.key, True, 0.0)
        facts.since = None

    def held(self, facts: RequestFacts, transfer: str) -> None:
        """Record that a request is over whose blocks are held for others."""
        facts.span = self._spans.begin(OFFER, facts.request, transfer)

    # --- those that take no part ---------------------------------------------------------------------------------------

    def not_offered(self, request: str, reason: Reason, why: str) -> None:
        """Count a request that is not offered, and log it unless another was logged for this reason just now."""
        self.count(reason)
        self._remember(request, f"it is not offered to other engines ({reason}): {why}")
        if (more := self._more("offered", reason)) is not None:
            log.warning("request %s is not offered to other engines (%s): %s%s", printable(request), reason, why, more)

    def not_loaded(self, request: str, reason: Reason, why: str) -> None:
        """Count a request that is not loaded, and log it unless another was logged for this reason just now."""
        self.counts.count("not_loaded", str(reason))
        self._remember(request, f"it is computed here: {why}")
        if (more := self._more("loaded", reason)) is not None:
            log.warning("request %s is computed here: %s%s", printable(request), why, more)

    def unreadable(self, request: str, error: Exception) -> None:
        """Record a request of which something cannot be read; the log has the place in the code, if another was not logged just now."""
        self._remember(request, "it takes no part in KV transfer: what it says cannot be read")
        if (more := self._more("read", Reason.INVALID)) is not None:
            what = "request %s takes no part in KV transfer, because what it says cannot be read%s"
            log.warning(what, printable(request), more, exc_info=error)

    def count(self, reason: Reason) -> None:
        """Count a request that is not offered and whose line is logged elsewhere."""
        self.counts.count("not_offered", str(reason))

    def _more(self, what: str, reason: Reason) -> str | None:
        """Return how many lines of this kind were not logged, as the end of a line; None if this one is not to be logged either."""
        held = self._repeats.logged((what, reason))
        return None if held is None else f" ({held} more like this were not logged)" if held else ""

    # --- what vLLM asks for --------------------------------------------------------------------------------------------

    def heard(self, gauges: dict[str, dict[str, Any]]) -> None:
        """Take in the gauges of ranks where one has changed."""
        if gauges:
            self.counts.data["gauges"] = self._gauges.heard(gauges)

    def stats(self, side: SchedulerSide) -> KVXferStats | None:
        """Return what there is to tell since the last call, if anything."""
        for name, n in self._news.take(side.asked, side.answered).items():
            self.counts.count("prefixes", name, n)
        if self.counts.is_empty():
            return None
        out, self.counts = self.counts, KVXferStats()
        return out
