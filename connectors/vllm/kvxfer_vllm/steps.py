"""The engine's steps: how fast they compute prompts, what of loads is told with one, and how long an engine that is to stop makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvxfer import clock
from kvxfer.engine import SchedulerSide, Update
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import RequestId
from kvxfer.logs import logger
from kvxfer_vllm.internals import EngineLoop, PrefixCache
from kvxfer_vllm.metadata import StepMetadata
from kvxfer_vllm.requests import KnownRequests, RequestLog
from kvxfer_vllm.stats import DELIVERED

log = logger("kvxfer.vllm")

MIN_TOKENS = 256
"""Tokens of prompts in a step whose time counts. Of shorter steps, most goes into the step itself."""
FULL_TOKENS = 1024
"""Tokens of prompts in a step that is full, or half of the most if that is more. Once there was one, shorter ones do not count."""


class PromptPace:
    """Times steps; one thread.

    Args:
        takes: Told the tokens of prompts that a step has computed, and the seconds that it took.
        most: The most tokens of a step.
        ahead: The most steps that have begun and not ended: more than one with asynchronous scheduling.
    """

    def __init__(self, takes: Callable[[int, float], None], most: int, ahead: int) -> None:
        self._takes, self._full, self._least = takes, max(FULL_TOKENS, most // 2), MIN_TOKENS
        self._begun: deque[tuple[int, float]] = deque(maxlen=ahead)
        self._ended = 0.0  # when the last step ended

    def begins(self, tokens: int, requests: int) -> None:
        """Record that a step begins, with its tokens and its requests; of each answer it computes one token."""
        self._begun.append((tokens if tokens - requests >= self._least else 0, clock.now()))

    def ended(self) -> None:
        """Record that the oldest step has ended. It was computed from its beginning on, or from the end of the one before."""
        now = clock.now()
        tokens, begun = self._begun.popleft() if self._begun else (0, now)
        if tokens:
            self._takes(tokens, now - max(begun, self._ended))
            if tokens >= self._full:
                self._least = self._full
        self._ended = now


class LoadNews:
    """What vLLM is told of loads that are over, and of requests whose blocks it may free. One thread.

    It takes some of that from workers only, which say it once they were told, with the next step.
    """

    def __init__(self, requests: KnownRequests, told: RequestLog, cache: PrefixCache, block_tokens: int) -> None:
        self._requests, self._told, self._cache, self._block_tokens = requests, told, cache, block_tokens
        self._refused: list[tuple[RequestId, Failure]] = []  # loads that could not begin
        self._next = StepMetadata()

    def refused(self, name: str, why: str) -> None:
        """Record that the load of a request could not begin."""
        self._refused.append((RequestId(name), Failure(FailureKind.MISUSE, why)))

    def over(self, update: Update, over: set[str]) -> set[str]:
        """Process what ranks have reported, and the loads that vLLM knows to be ``over``; return those that it can be told of now."""
        self._next.freed += tuple(update.free)
        ends: dict[RequestId, Failure | None] = {**dict.fromkeys(update.loaded), **update.failed, **dict(self._refused)}
        self._refused.clear()
        over = over | {name for name, failure in ends.items() if self._ended(name, failure, update.short.get(name))}
        for facts in [facts for facts in map(self._requests.last, over) if facts is not None]:
            if facts.saves:
                over.remove(facts.name)
                self._next.freed += (facts.name,)
            facts.loading = facts.saves = False
        return over

    def _ended(self, name: str, failure: Failure | None, short: int | None) -> bool:
        """Record how a load has ended, ``short`` of what was to come if at that token; return whether vLLM can be told now."""
        facts = self._requests.running(name)
        if facts is None:
            return True  # and frees the blocks of a request that is over
        self._told.ended(facts, DELIVERED if failure is None else str(failure.kind))
        if failure is not None and facts.asking:
            self._cache.compute_anew(facts.request)
        elif failure is not None:
            self._next.failed += (name,)
            return False
        elif short is not None:  # where a table is of one row
            self._next.partial[name] = tuple(self._cache.table(name)[0][short // self._block_tokens :])
            return False
        return True

    def take(self) -> StepMetadata:
        """Return what workers are to say, for the next step."""
        step, self._next = self._next, StepMetadata()
        return step

    def __len__(self) -> int:
        """Return how many loads are over of which vLLM has yet to hear."""
        return len(self._refused) + len(self._next.failed) + len(self._next.partial)


CLOSE_S = 2.0
"""Seconds of vLLM's time for its shutdown that are left to end connections and processes."""


class Stopping:
    """Decides how long an engine stays; the engine's thread.

    Args:
        loop: What knows that it has been asked to stop.
        side: What others ask.
        quiet: Seconds since the last request or question after which it need not stay.
        timeout: Seconds that vLLM gives its engine (``--shutdown-timeout``), after which it is killed.
    """

    def __init__(self, loop: EngineLoop, side: SchedulerSide, quiet: float, timeout: float) -> None:
        self._loop, self._side, self._quiet, self._timeout = loop, side, quiet, timeout
        self._until: float | None = None
        self._asked = 0  # inquiries that had come at the last look

    def look(self, busy: bool) -> None:
        """Notice that the engine is to stop. Call it with each step, and when vLLM asks whether something is left to do.

        Args:
            busy: Whether a request runs, or others have been promised what is held for them.
        """
        if not self._loop.stopping:
            return
        now, asked = clock.now(), self._side.answered.inquiries
        if self._until is None:
            self._until = now + self._timeout - CLOSE_S
            if self._quiet and now < self._until:
                log.info(
                    "the engine is to stop: others can ask for what it holds until %g s after its last request and their last question, "
                    "and for %g s at the most",
                    self._quiet,
                    self._timeout,
                )
        elif not busy and asked == self._asked:
            return
        self._asked = asked
        self._side.drain(max(0.0, min(self._quiet, self._until - now)))
