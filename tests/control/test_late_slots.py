"""A link is made again while the data thread has still to tell of a slot of a part that the broken one carried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvxfer.control.outbound import Outbound
from kvxfer.data.commands import SlotNews
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended, PartRef
from tests.control.conftest import SeededEngine, fetch, offered, until
from tests.relay import Relay

T = TransferId("own/1/t", 0)


def test_its_peer_does_not_hear_of_it_before_the_hello(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would refuse what a stranger says, and the load would end, though the link could be made."""
    p, d = engine({}, seed=1), engine({})
    relay = Relay(p.agents[0].descriptor.address)
    p.directory.publish((replace(p.agents[0].descriptor, address=relay.address),))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    until(lambda: any(status.up for status in d.agents[0].links()))
    dial = Outbound.dial

    def again(self: Outbound, link: Any, now: float) -> None:
        dial(self, link, now)
        late = SlotNews(PartRef("consumer", link, T, 1, 0), m.SlotFree(T, 1, 0, 0))
        d.agents[0]._runtime.result(late, now)

    monkeypatch.setattr(Outbound, "dial", again)
    relay.cut()
    until(lambda: relay.connections == 1 and any(status.up for status in d.agents[0].links()) or d.seen)
    p.agents[0].offer(offered([3], 4, transfer=T))
    (end,) = d.wait(Ended)
    relay.close()
    assert end.outcome.delivered, end
