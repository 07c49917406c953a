"""What `kvxfer why` makes of the stories of both sides, whatever they are."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.cli.verdict import judge, tale
from kvxfer.failures import ADVICE, FailureKind
from kvxfer.protocol.messages import Story

K = FailureKind
T0 = 1000.0


def decode(outcome: str = "delivered", text: str = "", **more: Any) -> Story:
    return Story(role="consumer", request="r", outcome=str(outcome), text=text, at=T0, **more)


def prefill(outcome: str = "delivered", text: str = "", *, at: float = T0, **more: Any) -> Story:
    return Story(role="producer", request="q", outcome=str(outcome), text=text, at=at, **more)


def absent(text: str) -> Story:
    return Story(role="none", request="r", text=text, at=T0)


def failed(kind: FailureKind, text: str, **more: Any) -> Story:
    return decode(kind, f"{text}; {ADVICE[kind]}", **more)


STAGES = {"fetched": 1.0, "began": 1.5, "asked": 2.0, "announced": 6.0, "ended": 6.5}
STARVED = failed(K.NEVER_OFFERED, "nothing came", stages={"asked": 5.0, "ended": 10.0})
LATE = failed(K.UNFETCHED, "it is gone", stages={"asked": 5.0, "ended": 5.0})
UNASKED = failed(K.PEER_UNREACHABLE, "no answer", stages={"ended": 9.0})
BROKEN = failed(K.PEER_LOST, "the link broke", stages={"asked": 5.0, "ended": 10.0})
TOLD = failed(K.WITHDRAWN, "p: the card is gone", stages={"asked": 5.0, "ended": 10.0})
EXPIRED = prefill(K.UNFETCHED, at=T0 - 40, stages={"computed": 1.0, "ended": 31.0})
CARD = prefill(K.BACKEND_FAILED, "the card is gone")
ROUTED = "check that the router sends the request on"


def waits(where: str) -> Story:
    return decode(where, over=False, stages={"now": 3.0})


def offers(**stages: float) -> Story:
    return prefill("offered", over=False, stages=stages)


GOOD: dict[str, tuple[Story | None, Story | None, str, str]] = {
    "delivered": (None, prefill(came=2000), "it was delivered: consumers have confirmed 2.0 kB", ""),
    "computed": (
        None,
        offers(),
        "the prefill engine is still computing it, and no decode engine that was asked knows of it",
        "",
    ),
    "begins": (
        waits("waiting"),
        offers(),
        "waits for the prefill engine to begin; the prefill engine has not computed all of it yet",
        "ask again",
    ),
    "blocks": (
        waits("open"),
        offers(computed=1.0),
        "over after 3.0 s: it waits for free blocks of the decode engine",
        "ask again",
    ),
    "shared": (waits("shared"), prefill(), "another request of the same prompt loads it", "ask again"),
    "moves": (waits("moving"), None, "its bytes are on their way", "ask again"),
    "cached": (decode("not loaded", "all of it was cached"), None, "all of it was cached", ""),
    "fast": (
        decode(stages=STAGES, came=1000, announced=1000, moving=0.5),
        None,
        "delivered in 6.500 s, 1.0 kB at 2.0 kB/s; most of it, 4.000 s, went into waiting for the prefill engine to compute or to answer",
        "",
    ),
    "a part": (decode(came=1000, announced=4000), None, "it was delivered in 0.000 s, 1.0 kB of 4.0 kB", ""),
}
"""What is no fault: decode's story, prefill's, how the verdict ends, and what it says to do."""

BAD: dict[str, tuple[Story | None, Story | None, str, str]] = {
    "no params": (
        None,
        absent("'params' are missing"),
        "the prefill engine did not offer it: 'params' are missing",
        "router-contract",
    ),
    "short": (None, absent("the prompt is short"), "the prefill engine did not offer it: the prompt is short", ""),
    "nobody comes": (
        None,
        offers(computed=1.0),
        "the decode engine that was asked knows nothing of it (offered)",
        ROUTED,
    ),
    "nobody came": (
        None,
        prefill(K.UNFETCHED),
        "the decode engine that was asked knows nothing of it (unfetched)",
        ROUTED,
    ),
    "no router": (
        absent("the router sent nothing"),
        None,
        "the decode engine did not load it: the router sent nothing",
        "router-contract",
    ),
    "kept": (
        absent("cached"),
        offers(),
        "not load it: cached; the prefill engine still holds its KV until its lease ends",
        "",
    ),
    "not kept": (absent("cached"), prefill(K.UNFETCHED), "the decode engine did not load it: cached", ""),
    "begun": (
        STARVED,
        offers(begun=2.0, computed=11.0),
        "nothing came; the prefill engine had not computed all of it",
        "start_timeout",
    ),
    "queued": (
        STARVED,
        offers(begun=11.0),
        "nothing came; the prefill engine still had it in its queue",
        "start_timeout",
    ),
    "all there": (STARVED, offers(begun=1.0, computed=2.0), "nothing came", ADVICE[K.NEVER_OFFERED]),
    "not queried": (STARVED, None, "nothing came", ADVICE[K.NEVER_OFFERED]),
    "no part": (
        STARVED,
        absent("no params"),
        "nothing came; the prefill engine says: no params",
        ADVICE[K.NEVER_OFFERED],
    ),
    "lease": (
        LATE,
        EXPIRED,
        "its lease had ended 14.0 s before the decode engine asked",
        "raise 'lease' on the prefill engine above 44 s",
    ),
    "not asked": (
        UNASKED,
        prefill(K.UNFETCHED),
        "no answer; the prefill engine had it, and was not asked",
        ADVICE[K.PEER_UNREACHABLE],
    ),
    "other reason": (BROKEN, CARD, "the link broke; the prefill engine says: the card is gone", ADVICE[K.PEER_LOST]),
    "same reason": (TOLD, CARD, "p: the card is gone", ADVICE[K.WITHDRAWN]),
}
"""What is one."""


@pytest.mark.parametrize("what", [*GOOD, *BAD])
def test_what_it_means(what: str) -> None:
    consumer, producer, says, do = (GOOD | BAD)[what]
    found = judge(consumer, producer)
    assert found.ok is (what in GOOD)
    assert found.says.endswith(says)
    assert do in found.do and bool(do) == bool(found.do)


def test_another_engine_at_the_address() -> None:
    found = judge(STARVED, None, "10.0.0.7:9")
    assert (
        found.says == "nothing came; the engine at 10.0.0.7:9 knows nothing of it" and "may have restarted" in found.do
    )
    assert judge(BROKEN, None, "10.0.0.7:9").says == "the link broke"


def test_each_side_s_stages_are_told_in_the_order_of_time() -> None:
    stages = {"announced": 2.0, "asked": 1.0, "last": 3.0, "arrived": 3.5, "ended": 4.0}
    told = tale(decode(stages=stages, came=1000, announced=2000, moving=0.5, tokens=7))
    assert told == [
        (T0, "the request arrived at the decode engine (7 tokens)"),
        (T0 + 1.0, "the link was up, and the producer was asked"),
        (T0 + 2.0, "the producer announced the first part"),
        (T0 + 3.5, "all bytes were here (1.0 kB of 2.0 kB at 2.0 kB/s)"),
        (T0 + 4.0, "it ended: delivered"),
    ]
    del stages["arrived"]
    assert (T0 + 3.0, "the last bytes came (1.0 kB at 2.0 kB/s)") in tale(
        decode(stages=stages, came=1000, announced=1000, moving=0.5)
    )
    told = tale(prefill("offered", came=512, over=False, stages={"computed": 1.0, "now": 2.0}, tokens=7))
    assert told == [
        (T0, "the request was offered (7 tokens)"),
        (T0 + 1.0, "all tokens were computed"),
        (T0 + 2.0, "it is not over yet: offered"),
    ]
    assert tale(prefill(came=512, stages={"ended": 2.0}))[1:] == [(T0 + 2.0, "it ended: delivered, 512 B confirmed")]
    assert tale(absent("no params")) == [(T0, "no params")]
