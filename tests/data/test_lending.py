"""What a link shows of this side's memory: no more than its mode needs, where the back end can keep the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import KvxferError, TransportError
from kvxfer.geometry import Region
from kvxfer.identity import TransferId
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import Batch, Completion, Transport, Verb, load
from tests.conftest import require
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


def side(name: str, backend: str, **options: Any) -> tuple[Transport, list[np.ndarray]]:
    transport = load(backend)(name, options)
    memories = [np.full(1 << 16, i + 1, np.uint8) for i in range(2)]
    for memory in memories:
        transport.register([Region(memory.ctypes.data, memory.nbytes)])
    return transport, memories


def outcome(transports: list[Transport], batch: Callable[[], int]) -> Exception | None:
    """How a batch of the first ends; refused at once, or in time."""
    try:
        number = batch()
    except TransportError as e:
        return e
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ends: list[Completion] = transports[0].poll()
        for other in transports[1:]:
            other.poll()
        for end in ends:
            if end.batch == number:
                return end.error
        time.sleep(0.001)
    raise AssertionError("the batch did not end")


@pytest.mark.parametrize("backend", ["cma", "nixl"])
def test_memory_that_was_not_lent_is_out_of_reach(backend: str) -> None:
    require(backend)
    (a, _), (b, theirs) = side("a", backend), side("b", backend)
    mine, shown = a.endpoint(), b.endpoint_lending([1], False)
    peer, back = a.connect(mine, shown), b.connect(shown, mine)
    zero, size = np.zeros(1, np.int64), np.full(1, 100, np.int64)

    def move(verb: Verb, memory: int) -> Exception | None:
        return outcome([a, b], lambda: a.submit(Batch(verb, peer, 0, size, zero, memory, zero)))

    assert move(Verb.READ, 1) is None
    assert isinstance(move(Verb.READ, 0), TransportError)
    assert (theirs[0] == 1).all()
    b.disconnect(back)
    a.close()
    b.close()


def test_cma_through_shared_memory_lets_nobody_write_who_may_only_read() -> None:
    """There the owner copies, and can refuse; where the kernel copies, whoever may read may write."""
    require("cma")
    (a, _), (b, theirs) = side("a", "cma", mode="shm"), side("b", "cma", mode="shm")
    zero, size = np.zeros(1, np.int64), np.full(1, 100, np.int64)
    for lent, writable, verb, memory, allowed in [
        ([0, 1], False, Verb.READ, 0, True),
        ([0, 1], False, Verb.WRITE, 0, False),
        ([1], True, Verb.WRITE, 1, True),
        ([1], True, Verb.WRITE, 0, False),
        ([1], True, Verb.READ, 0, False),
    ]:
        mine, own = a.endpoint(), b.endpoint_lending(lent, writable)
        peer, back = a.connect(mine, own), b.connect(own, mine)
        before = theirs[memory].copy()
        error = outcome([a, b], lambda: a.submit(Batch(verb, peer, 1, size, zero, memory, zero)))  # noqa: B023
        assert (error is None) == allowed, (verb, memory, error)
        if not allowed:
            assert isinstance(error, KvxferError) and (theirs[memory] == before).all()
        a.disconnect(peer)
        b.disconnect(back)
    a.close()
    b.close()
