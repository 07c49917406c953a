"""Metrics of prefixes that are looked for at other engines, and of what other engines look for here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import msgspec

from kvxfer.engine import AnswerCounts, AskCounts

__all__ = ["PrefixMetrics", "PrefixNews"]

ASKED = {"requests": "asked", "unanswered": "unanswered"}
TOKENS = ("found", "loaded", "refused", "recomputed")
"""Fields of ``AskCounts``: those that count requests, and how they are called here; those that count tokens."""
HELD, REFUSED = "held", "refused"
KINDS = ("nixl", "remote_kv_source", "kv_hint", "kvxfer_sources")
"""What names sources; see ``hints``."""


class PrefixNews:
    """By how much counts have grown since they were last told; one thread."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._answered, self._asked = AnswerCounts(), dict[str, AskCounts]()

    def take(self, asked: Mapping[str, AskCounts], answered: AnswerCounts) -> dict[str, int]:
        """Return the growth of each count, by ``"kind/field"``; what others have asked has an empty kind. Leaves out zeros."""
        if answered == self._answered and asked == self._asked:  # as in most steps
            return {}
        self._answered, self._asked = copy(answered), {kind: copy(counts) for kind, counts in asked.items()}
        now = {f"/{field}": n for field, n in msgspec.structs.asdict(answered).items()}
        for kind, counts in asked.items():
            now |= {f"{kind}/{field}": n for field, n in msgspec.structs.asdict(counts).items()}
        news = {name: n - self._told.get(name, 0) for name, n in now.items() if n != self._told.get(name, 0)}
        self._told |= now
        return news


class PrefixMetrics:
    """Counters in vLLM's registry. ``make``: makes one of a kind, with a name, a description and further labels."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._requests = make(
            "counter",
            "kvxfer_prefix_requests",
            "Requests for which other engines were asked for a prefix, and those to which none has answered in time, "
            "by what named these engines.",
            "outcome",
            "source",
        )
        self._tokens = make(
            "counter",
            "kvxfer_prefix_tokens",
            "Tokens that other engines held of prompts of this engine: found beyond what was cached here, and of these "
            "loaded, refused because no load would have ended sooner, or recomputed because the load failed.",
            "outcome",
            "source",
        )
        self._inquiries = make(
            "counter",
            "kvxfer_inquiries",
            "Questions of other engines for a prefix, by answer: held, nothing, or refused for want of room.",
            "answer",
        )
        self._offered = make(
            "counter", "kvxfer_inquired_tokens", "Tokens that were offered in answer to such questions."
        )

    def begin(self, values: list[Any]) -> None:
        """Show all of an engine's counters from the start."""
        for kind in KINDS:
            for outcome in ASKED.values():
                self._requests.labels(*values, outcome, kind)
            for outcome in TOKENS:
                self._tokens.labels(*values, outcome, kind)
        for answer in (HELD, "nothing", REFUSED):
            self._inquiries.labels(*values, answer)
        self._offered.labels(*values)

    def observe(self, values: list[Any], news: Mapping[str, int]) -> None:
        for name, n in news.items():
            kind, _, field = name.rpartition("/")
            if kind and field in ASKED:
                self._requests.labels(*values, ASKED[field], kind).inc(n)
            elif kind:
                self._tokens.labels(*values, field, kind).inc(n)
        held, refused = news.get(f"/{HELD}", 0), news.get(f"/{REFUSED}", 0)
        for answer, n in ((HELD, held), (REFUSED, refused), ("nothing", news.get("/inquiries", 0) - held - refused)):
            self._inquiries.labels(*values, answer).inc(max(n, 0))
        self._offered.labels(*values).inc(news.get("/tokens", 0))
