"""Requests that look for a prefix of their prompt at other engines, from the question to the load or to "nothing"."""

from __future__ import annotations

import msgspec

__all__ = ["AskCounts"]


class AskCounts(msgspec.Struct):
    """What has come of looking for prefixes at other engines.

    Attributes:
        requests: Requests that have asked.
        unanswered: Those of which no source has answered in time.
        found: Tokens that the best source held beyond what was cached here, of all requests.
        loaded: Those of them that were loaded.
        refused: Those that were computed, since no load would have ended sooner.
        recomputed: Those whose load failed, so that they were computed.
    """

    requests: int = 0
    unanswered: int = 0
    found: int = 0
    loaded: int = 0
    refused: int = 0
    recomputed: int = 0
