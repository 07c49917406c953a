"""A batch that outlives its link: it costs the back end a reset, and no later link of that peer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvxfer.data.commands import Connect, Connected, Disconnect, EndpointMade, LinkBroken, MakeEndpoint, Reset, Result
from kvxfer.data.data_thread import DataThread
from kvxfer.data.policy import stager
from kvxfer.data.quarantine import Limits
from kvxfer.geometry import Cache, Planner, route
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Move, Moved, PartRef
from kvxfer.testing.fake import FakeTransport, Network
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Verb

LINK, GRACE_S = b"link", 0.3


class Endless(FakeTransport):
    """The batches of a link that is closed end only when the back end is closed."""

    def drop_link(self, number: int, link: LinkEnd) -> None:
        pass


def test_a_batch_that_outlives_its_link_does_not_cost_the_next_one() -> None:
    """The next link was broken for it each time that it had been made, and its memory was never released."""
    net = Network()
    options: dict[str, Any] = {"network": net, "verbs": ["send", "recv"]}
    memory = np.zeros((1, 256, 4, 1024), np.uint8)
    cache = Cache.of_tensors(memory, "layer block token unit")
    planner = Planner(cache, cache, route([cache], [cache])[cache.rank].assignments[cache.rank])
    results: list[Result] = []
    data = DataThread(
        "fake",
        lambda: Endless("receiver", options),
        cache.regions,
        stager(cache, 8 * 4096),
        results.append,
        Limits(grace=GRACE_S, quarantine=1 << 40),
    )
    peer = FakeTransport("sender", options)

    def connect(number: int) -> None:
        data.post(MakeEndpoint(LINK, number, "fake", "consumer"))
        made = wait(EndpointMade, number)[-1]
        theirs = peer.endpoint()
        data.post(Connect(LINK, number, made.endpoint, theirs))
        peer.connect(theirs, made.endpoint)
        wait(Connected, number)

    def wait(sort: type, count: int = 1) -> list[Any]:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            if len(found := [r for r in results if isinstance(r, sort)]) >= count:
                return found
            time.sleep(0.002)
        raise AssertionError(f"{count} x {sort.__name__} did not come: {results}")

    data.start(5.0)
    try:
        connect(1)
        plan = planner.plan([range(64)], [range(64)], 0, 256)
        data.post(Move(PartRef("consumer", LINK, TransferId("own/1/x", 0), 1, 1), Verb.RECV, plan, 1, 0))
        data.post(Disconnect(LINK))
        connect(2)
        (end,) = wait(Moved)
        assert end.quiet
        assert wait(Reset) and not [r for r in results if isinstance(r, LinkBroken)]
    finally:
        data.close(5.0)
        peer.close()
