"""What an engine tells an operator who asks its directory: of requests, and of prefixes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from kvxfer.engine.answers import AnswerCounts
from kvxfer.engine.asks import AskCounts
from kvxfer.engine.stories import Stories
from kvxfer.protocol.messages import Explain, Explained, Prefixes


def tell(
    stories: Stories, theirs: AnswerCounts, latest: Iterable[float], asks: Mapping[str, AskCounts], asked: Explain
) -> Explained:
    """Return what is known of the requests that are asked for, and what became of all questions for prefixes. Any thread.

    Args:
        stories: The requests.
        theirs: What others have asked.
        latest: The seconds that the latest answers to others took.
        asks: What this engine has asked of others, by who has named these.
        asked: Which requests.
    """
    took, ours = list(latest), list(asks.values())
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
