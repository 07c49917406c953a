"""What an engine tells an operator who asks its directory: of requests, and of prefixes."""

from __future__ import annotations

import statistics

from msgspec.structs import replace

from kvxfer.engine.answers import PrefixAnswers
from kvxfer.engine.asks import Asks
from kvxfer.engine.stories import Stories
from kvxfer.protocol.messages import Explain, Explained, Prefixes

__all__ = ["tell"]


def tell(stories: Stories, answers: PrefixAnswers, asks: Asks, asked: Explain) -> Explained:
    """Return what is known of the requests that are asked for, and what became of all questions for prefixes. Any thread."""
    theirs, took, ours = answers.counts, list(answers.took), list(asks.counts.values())
    prefixes = Prefixes(
        inquiries=theirs.inquiries,
        held=theirs.held,
        offered=theirs.tokens,
        refused=theirs.refused,
        answer_s=statistics.median(took) if took else 0.0,
        asked=sum(one.requests for one in ours),
        unanswered=sum(one.unanswered for one in ours),
        found=sum(one.found for one in ours),
        loaded=sum(one.loaded for one in ours),
        dear=sum(one.refused for one in ours),
        recomputed=sum(one.recomputed for one in ours),
    )
    return replace(stories.explain(asked), prefixes=prefixes)
