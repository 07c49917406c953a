"""What a link shows of this side's memory: no more than its mode needs, where the back end can keep the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import pytest

from kvxfer.identity import TransferId
from kvxfer.testing.fake import FakeTransport
from tests.control.conftest import Ended, SeededEngine, engine, fetch, offered

__all__ = ["engine"]

T = TransferId("own/1/lent", 0)
CACHE, STAGING = 0, 1


class Recording(FakeTransport):
    """Notes what each engine lends."""

    lent: ClassVar[dict[str, tuple[set[int], bool]]] = {}

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        self.lent[self.agent.partition("-")[0]] = set(memories), writable
        return super().endpoint_lending(memories, writable)


@pytest.mark.parametrize(
    ("options", "producer", "consumer"),
    [
        ({"verbs": ["read"]}, {CACHE, STAGING}, set()),
        ({"verbs": ["write"]}, set(), {CACHE, STAGING}),
        ({"verbs": ["write"], "quiet": "backend_reset"}, set(), {STAGING}),
        ({"verbs": ["send", "recv"]}, set(), set()),
    ],
    ids=["read", "write", "write through slots", "send"],
)
def test_what_either_side_lends(
    engine: Callable[..., SeededEngine],
    options: Mapping[str, Any],
    producer: set[int],
    consumer: set[int],  # noqa: F811
) -> None:
    Recording.lent = {}
    backend = "tests.data.test_lending:Recording"
    p, d = (engine({"backend": backend, **options}, seed=seed) for seed in (1, None))
    p.agents[0].offer(offered([3], 4, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    names = [agent._name.partition("-")[0] for agent in (p.agents[0], d.agents[0])]
    assert [Recording.lent[name][0] for name in names] == [producer, consumer]
    assert not Recording.lent[names[0]][1], "nobody writes to a producer"
