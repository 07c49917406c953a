"""A directory that describes another engine's rank otherwise than it is costs nobody else anything."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended
from tests.control.conftest import fetch, offered, until
from tests.control.stranger import served


def test_what_one_directory_says_of_a_rank_is_not_believed_for_the_fetches_of_another(engine) -> None:
    """They had shared the link to that rank, over which whoever came first had said where its layers are."""
    options = {"verbs": ["read"], "run_bytes": 1}  # straight out of its cache
    p, d = engine(dict(options), seed=1), engine(dict(options))
    rank = p.agents[0].descriptor
    (view,) = rank.cache.views
    false = replace(rank, cache=replace(rank.cache, views=(replace(view, offsets=view.offsets[::-1]),)))
    liar = m.EngineDescriptor(m.PROTOCOL, "liar", 77, (false,))
    with served(lambda asked: liar if isinstance(asked, m.Lookup) else None) as port:
        d.agents[0].prepare(Source("127.0.0.1", port, 77))
        until(lambda: any(link.up for link in d.agents[0].links()))
        transfer = TransferId("own/1/honest", 0)
        p.agents[0].offer(offered([3], 4, transfer=transfer))
        d.agents[0].fetch(fetch(p.source, [5], 4, transfer=transfer, handle="honest"))
        (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    assert np.array_equal(d.block(5), p.block(3)), "delivered, with other bytes than were offered"
