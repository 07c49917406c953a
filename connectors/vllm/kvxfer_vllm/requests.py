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
    """One request, from its arrival until vLLM says that it is over, or until its blocks are no longer held for others."""

    name: str  # vLLM's id of it
    number: int  # requests count up in the order of their arrival
    request: Any = None
    over: bool = False  # and its blocks are held for others
    earlier: RequestFacts | None = None  # a request of this name that is over and whose blocks are held
    salt: str | None = None  # the cache salt that it came with, if it was ``reloaded``
    reloaded: bool = False  # whether vLLM caches it under another salt, because its adapter had been loaded again
    adapter: tuple[int, int] | None = None  # its number, and how often that had been replaced when the request came
    naming: Naming | None = None  # names its first tokens by content, until it is over
    asked_in: int = 0  # the step for which vLLM has asked about it, and has no blocks for it so far
    nothing: Ticket | None = None  # what is told of it although it has nothing to offer
    refused: bool = False  # what it says cannot be read: it takes no part in KV transfer
    loading: bool = False  # whether vLLM waits for the end of its load
    saves: bool = False  # it is over while it loads, and beside it other connectors may keep its blocks
    promised: int = 0  # how many tokens vLLM was last told that it can load
    end: int = 0  # up to which token its load is to bring its prompt
    into: BlockTable | None = None  # the blocks of its load, if that may be here in part
    # blocks of its load that begin behind a window, and may be left unfilled
    behind: set[int] = field(default_factory=set)
    unfilled: set[int] = field(default_factory=set)  # those of them that have been taken out of the prefix cache
    since: float | None = None  # when it came, if it is not known yet what becomes of its load
    key: bytes | None = None  # the key of the offer that its load takes
    passers: set[str] | None = None  # the names of those that have passed its load, which is skipped for want of room
    asking: bool = False  # other engines, for a prefix; what they hold fails no request, whatever vLLM's policy
    kind: str = ""  # who has named these engines: a router's schema
    lost: bool = False  # whether its load has failed
    answers: bool = False  # whether its router is told, when it ends, where the KV is
    batch: HttpBatch | None = None  # the HTTP request that it belongs to, if it offers
    span: Any = None  # the span of its load, and later the span of its offer

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
        if getattr(request, "abort_immediately", False):
            return  # vLLM's front end makes one up, for a request that it has refused or whose client is gone
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
