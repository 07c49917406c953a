"""How counts of prefixes become counters: by how much they have grown, each once."""

from __future__ import annotations

from kvxfer.engine import AnswerCounts, AskCounts
from kvxfer_vllm.stats import KVXferStats, PrefixNews


def test_what_has_grown_is_told_once() -> None:
    news, asked, answered = PrefixNews(), {"nixl": AskCounts()}, AnswerCounts()
    assert news.take(asked, answered) == {}
    asked["nixl"].requests, asked["nixl"].found = 2, 96
    answered.inquiries = 3
    assert news.take(asked, answered) == {"nixl/requests": 2, "nixl/found": 96, "/inquiries": 3}
    assert news.take(asked, answered) == {}
    asked["kv_hint"] = AskCounts(requests=1)
    asked["nixl"].found += 4
    assert news.take(asked, answered) == {"nixl/found": 4, "kv_hint/requests": 1}


def test_stats_add_up() -> None:
    one, two = KVXferStats(), KVXferStats()
    one.count("prefixes", "nixl/loaded", 16)
    two.count("prefixes", "nixl/loaded", 32)
    two.count("prefixes", "/held")
    assert not one.is_empty()
    assert one.aggregate(two).data["prefixes"] == {"nixl/loaded": 48, "/held": 1}
