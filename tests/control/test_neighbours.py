"""What happens to one load costs the others on its link nothing: they are delivered over the connection that they began on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended, Released
from tests.control.conftest import SeededEngine, fetch, offered, until

K = FailureKind
GOOD = [TransferId("own/1/good", i) for i in range(6)]
BAD = TransferId("own/1/bad", 0)


def connections(p: SeededEngine) -> set[str]:
    """The other ends of the connections to the producer's agent, as the kernel knows them: one for each link."""
    port = f":{int(p.agents[0].descriptor.address.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[2] for row in rows if row[1].endswith(port) and row[3] == "01"}


def leaves(p: SeededEngine, d: SeededEngine) -> None:
    """The client goes away while the first half has arrived."""
    d.agents[0].cancel("bad", "the client left")


def is_withdrawn(p: SeededEngine, d: SeededEngine) -> None:
    """The producer's engine aborts the request."""
    p.agents[0].revoke(BAD, 1, "aborted", True)


def is_preempted_for_good(p: SeededEngine, d: SeededEngine) -> None:
    """The request is preempted and never computed anew; the client leaves later."""
    p.agents[0].revoke(BAD, 1, "preempted", False)
    d.agents[0].cancel("bad", "the client left")


@pytest.mark.parametrize("backend", ["zmq", "tcp", "fake"])
@pytest.mark.parametrize("end", [leaves, is_withdrawn, is_preempted_for_good])
def test_one_load_ends_badly_amid_others(
    engine: Callable[..., SeededEngine], backend: str, end: Callable[[SeededEngine, SeededEngine], None]
) -> None:
    options = {} if backend == "fake" else {"backend": backend}
    config = {"transfer_timeout": 20.0, "lease": 20.0}
    p, d = engine(dict(options), seed=1, blocks=32, **config), engine(dict(options), blocks=32, **config)
    for i, transfer in enumerate(GOOD):
        p.agents[0].offer(offered([i], 4, transfer=transfer, final=False))
        d.agents[0].fetch(fetch(p.source, [i, i + 8], 8, transfer=transfer, handle=f"good {i}"))
    p.agents[0].offer(offered([30], 4, transfer=BAD, final=False))
    d.agents[0].fetch(fetch(p.source, [30, 31], 8, transfer=BAD, handle="bad"))
    until(lambda: all(np.array_equal(d.block(i), p.block(i)) for i in (*range(6), 30)))
    links = connections(p)
    assert len(links) == 1

    end(p, d)
    (bad,) = d.wait(Ended)
    assert bad.handle == "bad" and bad.outcome.kind in {K.CANCELLED, K.WITHDRAWN}
    for i, transfer in enumerate(GOOD):
        p.agents[0].offer(offered([i, i + 8], 8, transfer=transfer))
    ends = d.wait(Ended, count=1 + len(GOOD))
    assert all(e.outcome.delivered for e in ends if e.handle != "bad"), ends
    d.wait(Released, count=1 + len(GOOD))
    assert all(np.array_equal(d.block(i + 8), p.block(i + 8)) for i in range(6))
    assert connections(p) == links, "the link was made anew"
