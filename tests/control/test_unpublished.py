"""A directory whose ranks are not published says so: a load waits for them, and ends with that reason where they do not come."""

import time

from kvxfer import Directory
from kvxfer.config import Config
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from tests.control.conftest import Ended, fetch, offered, until

T = TransferId("own/1/x", 0)


def test_a_load_ends_with_what_it_waited_for(engine) -> None:
    agent, ends = engine({}, peer_timeout=1.0, transfer_timeout=60.0).agents[0], []
    with Directory(Config(), "late") as late:
        begin = time.monotonic()
        agent.fetch(fetch(late.source, [5, 2, 9], 12, transfer=T))
        until(lambda: bool(ends.extend(e for e in agent.events() if isinstance(e, Ended)) or ends), 90.0)
        assert 0.9 < time.monotonic() - begin
    failure = ends[0].outcome.failure
    assert failure.kind is FailureKind.NOT_PUBLISHED
    assert "its ranks are not published yet" in failure.detail and "did not answer" not in failure.detail


def test_a_load_goes_on_once_they_are_published(engine) -> None:
    p, d, ends = engine({}, seed=1), engine({}), []
    agent = d.agents[0]
    with Directory(Config(), "late", epoch=p.agents[0].epoch) as late:
        agent.fetch(fetch(late.source, [5, 2, 9], 12, transfer=T))
        time.sleep(0.3)
        assert not agent.events()
        late.publish((p.agents[0].descriptor,))
        p.agents[0].offer(offered([1, 2, 3], 12, transfer=T))
        until(lambda: bool(ends.extend(e for e in agent.events() if isinstance(e, Ended)) or ends))
    assert ends[0].outcome.delivered
