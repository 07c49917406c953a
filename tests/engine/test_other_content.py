"""A router gives two engines one name for the transfer, and they do not mean the same KV by it: nobody waits for what will not come."""

from __future__ import annotations

import pytest

from kvxfer import BlockTable, TransferId
from kvxfer.engine import Ticket
from kvxfer.testing.engine import PagedEngine, until

JOB, TOKENS = TransferId.routed("job"), 40


def compute(p: PagedEngine) -> None:
    """The producer computes its prompt, and the request ends."""
    assert p.scheduler.offer("p", JOB, b"p", TOKENS)
    p.run("p", b"p", 0, TOKENS)
    p.step()
    assert p.scheduler.finished("p", BlockTable.of([p.tables["p"]]), complete=True)


@pytest.mark.parametrize("first", ["the consumer", "the producer"])
@pytest.mark.parametrize("differ", ["prompts", "models"])
def test_a_request_is_computed_at_once(first: str, differ: str, caplog: pytest.LogCaptureFixture) -> None:
    """Had it waited, it would have been for `start_timeout`: the digest of the producer has not begun, and never will."""
    model = {"model": "another" if differ == "models" else "one"}
    with PagedEngine(facts={"model": "one"}) as p, PagedEngine({"start_timeout": 600.0}, facts=model) as d:
        p.step(), d.step()
        if first == "the producer":
            compute(p)
        d.load("d", Ticket(JOB, b"d", p.scheduler.source, TOKENS), TOKENS, begun=False)
        if first == "the consumer":
            d.step()
            compute(p)
        until(lambda: (d.step(), p.step()) and "d" not in d._waiting)
        assert "d" not in d._loads and not d.failed
        assert "other content under the name of its transfer" in caplog.text
        with PagedEngine(facts={"model": "one"}) as right:  # for which nothing has changed
            right.load("r", Ticket(JOB, b"p", p.scheduler.source, TOKENS), TOKENS, begun=False)
            assert "r" in right.until("r").loaded
            right.verify()
