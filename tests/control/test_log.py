"""What the log says of a transfer's end, on both sides: the engine's own name for the request, the transfer, and why."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from tests.control.conftest import Ended, Released, fetch, offered

T = TransferId("own/1/x", 0)


def test_both_sides_name_their_engines_request(engine, caplog: pytest.LogCaptureFixture) -> None:
    p, d = engine({}, seed=1), engine({})
    p.agents[0].offer(msgspec.structs.replace(offered([3], 4, transfer=T, final=False), handle="cmpl-at-p"))
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=T, handle="cmpl-at-d"))
    p.agents[0].revoke(T, 1, "its client has left", True)
    (said,), (heard,) = p.wait(Ended), d.wait(Ended)
    assert (said.handle, heard.handle) == ("cmpl-at-p", "cmpl-at-d")
    assert said.outcome.kind is FailureKind.WITHDRAWN
    assert p.wait(Released)[0].handle == "cmpl-at-p"
    assert f"producer: request cmpl-at-p, transfer {T}: withdrawn" in caplog.text
    assert f"consumer: request cmpl-at-d, transfer {T}: " in caplog.text


def test_a_name_of_any_length_takes_no_more_of_a_line_than_can_be_read(
    engine, caplog: pytest.LogCaptureFixture
) -> None:
    p = engine({})
    long = TransferId("own/1/" + "x" * 4_000, 0)
    p.agents[0].offer(msgspec.structs.replace(offered([3], 4, transfer=long), handle="y" * 4_000))
    p.agents[0].revoke(long, 1, "given up", True)
    assert p.wait(Ended)[0].handle == "y" * 4_000
    p.wait(Released)
    (line,) = [r.getMessage() for r in caplog.records if "given up" in r.getMessage()]
    assert "producer: request yyy" in line and len(line) < 1000
