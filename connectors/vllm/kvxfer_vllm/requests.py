"""What the scheduler's process keeps of each of vLLM's requests, and what becomes of their loads, counted once for all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.engine import Prefix, Ticket
from kvxfer.failures import FailureKind as K
from kvxfer.protocol.timers import Recent
from kvxfer.values import BlockTable
from kvxfer_vllm.stats import CANCELLED, COMPUTED, DELIVERED, ELSEWHERE, KVXferStats
from kvxfer_vllm.tracing import LOAD, RequestSpans

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["HttpBatch", "LoadOutcomes", "Naming", "RequestFacts"]

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
    """One request, from its arrival until vLLM says that it is over, or until its blocks are no longer held for others.

    Attributes:
        name: vLLM's id of it.
        number: Requests count up in the order of their arrival.
        request: The request itself.
        over: Whether it is over, and its blocks are held for others.
        earlier: A request of this name that is over and whose blocks are held.
        salt: The cache salt that it came with, if it was ``reloaded``.
        reloaded: Whether vLLM caches it under another salt, because its adapter had been loaded again.
        adapter: The number of its adapter, and how often that had been replaced when the request came.
        naming: Names its first tokens by content, until it is over.
        asked_in: The step for which vLLM has asked about it, and has no blocks for it so far.
        nothing: What is told of it although it has nothing to offer.
        promised: How many tokens vLLM was last told that it can load.
        end: Up to which token its load is to bring its prompt.
        into: The blocks of its load, if that may be here in part.
        behind: Blocks of its load that lie behind a window, and are left unfilled.
        since: When it came, if it is not known yet what becomes of its load.
        key: The key of the offer that its load takes.
        passers: The names of those that have passed its load, which is skipped for want of room.
        asking: Whether other engines are asked for a prefix of it. What they hold fails no request, whatever vLLM's policy.
        kind: Who has named these engines: a router's schema.
        lost: Whether its load has failed.
        answers: Whether its router is told, when it ends, where the KV is.
        batch: The HTTP request that it belongs to, if it offers.
        span: The span of its load, and later the span of its offer.
    """

    name: str
    number: int
    request: Any = None
    over: bool = False
    earlier: RequestFacts | None = None
    salt: str | None = None
    reloaded: bool = False
    adapter: tuple[int, int] | None = None
    naming: Naming | None = None
    asked_in: int = 0
    nothing: Ticket | None = None
    promised: int = 0
    end: int = 0
    into: BlockTable | None = None
    behind: set[int] = field(default_factory=set)
    since: float | None = None
    key: bytes | None = None
    passers: set[str] | None = None
    asking: bool = False
    kind: str = ""
    lost: bool = False
    answers: bool = False
    batch: HttpBatch | None = None
    span: Any = None

    def end_span(self, outcome: str | None = None) -> None:
        """Close its span, if one is open."""
        span, self.span = self.span, None
        if span is not None:
            if outcome is not None:
                span.set_attribute("kvxfer.outcome", outcome)
            span.end()


class LoadOutcomes:
    """What becomes of the loads of requests; one thread.

    Attributes:
        used: What can be had once. The keys (``params.offer_key``) of the offers that such requests have had: a front end may call its
            engine several times under the params of one answer, after a tool, say, or for a retry. And what was offered for an HTTP
            request, which may have several requests: the transfer and the time of arrival.
        counts: What there is to tell since ``stats`` was called last.
    """

    def __init__(self, spans: RequestSpans) -> None:
        self._spans = spans
        self.counts = KVXferStats()
        self.used: Recent[Hashable, bool] = Recent(math.inf, MAX_USED)

    def expect(self, facts: RequestFacts, request: Request, transfer: str, key: bytes | None) -> None:
        """Record that a request has come whose KV is to be loaded, and the key of the offer that this takes, if it has one."""
        facts.since, facts.key = time.monotonic(), key
        facts.span = self._spans.begin(LOAD, request, transfer)

    def ended(self, facts: RequestFacts | None, outcome: str) -> None:
        """Process what has become of its load; the first word of a request counts, and what follows changes nothing."""
        if facts is None or facts.since is None:
            return
        self.counts.request(outcome, time.monotonic() - facts.since)
        facts.end_span(outcome)
        if facts.key is not None and outcome in GONE:
            self.used.put(facts.key, True, 0.0)
        facts.since = None

    def stats(self) -> KVXferStats | None:
        """Return what there is to tell since the last call, if anything."""
        if self.counts.is_empty():
            return None
        out, self.counts = self.counts, KVXferStats()
        return out
