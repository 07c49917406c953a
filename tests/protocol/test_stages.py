"""How long a load moved: what the producer took to compute between its parts, or to send those before, is no part of that."""

from __future__ import annotations

import pytest

from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Emit, Ended, Moved, Send
from tests.protocol.test_deadlines import Asker, T

MOVES = {
    "all at once": ([(5.0, 6.0)], 1.0),
    "as it is computed": ([(1.0, 2.0), (11.0, 12.0), (21.0, 22.0)], 3.0),
    "two at a time": ([(1.0, 2.0), (1.0, 3.0), (2.0, 4.0)], 3.0),
    "faster than it moves": ([(1.0, 4.0), (2.0, 7.0), (3.0, 10.0)], 9.0),
}
"""When each part is announced, and when it is here; the seconds in which some part was on its way."""


@pytest.mark.parametrize("case", MOVES)
def test_what_moves_is_timed_and_not_what_is_waited_for(case: str) -> None:
    parts, moving = MOVES[case]
    asker, actions, flying = Asker(), [], {}
    asker.machine.cancel("req", "it was of three parts", 0.0)
    asker = Asker(4 * len(parts))
    times = sorted([(at, 1, i) for i, (at, _) in enumerate(parts)] + [(at, 0, i) for i, (_, at) in enumerate(parts)])
    for now, heard, part in times:
        if heard:
            flying[part] = asker.hear(now, part, part == len(parts) - 1)
        else:
            move = flying.pop(part)
            actions = asker.machine.moved(Moved(move.ref, None, True, move.plan.nbytes, seconds=1.0), now)
    (asked,) = actions
    assert isinstance(asked, Send) and isinstance(asked.message, m.CommitRequest)
    last = parts[-1][1]
    ack = m.CommitAck(T, asker.asked.attempt, asked.message.round)
    (ended,) = (
        action.event
        for action in asker.machine.message("link", ack, last + 0.5)
        if isinstance(action, Emit) and isinstance(action.event, Ended)
    )
    assert ended.outcome.delivered
    assert ended.stages.moving == moving + 0.5, "until it was known to be good"
    assert (ended.seconds, ended.waited) == (last + 0.5, last - moving)
