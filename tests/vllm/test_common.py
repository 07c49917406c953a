"""D's prompt begins with P's, is another one, or comes a second time: what can be loaded is, and nothing fails or is held."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.protocol.values import Ended, Released, Stages
from kvxfer_vllm.said import CommonPart, Told, common_part
from tests.engine.direct import Switchboard
from tests.vllm.cases import CACHES, check, offers_nothing, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import ALIGNED, BLOCK, DRAFTING, FULL, HYBRID, PlayedEngine, answer, prompt
from tests.vllm.wire import Wire

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])
N = 60


def served(
    d: PlayedEngine, p: PlayedEngine, text: list[int], params: dict[str, Any], computed: int, **more: Any
) -> None:
    """D answers, and computes so many tokens of the prompt."""
    name = d.add(text, params, **more)
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == computed + 3


def outcomes(d: PlayedEngine) -> list[str]:
    return [outcome for stats in d.stats for outcome, _ in stats["requests"]]


@OVERLAP
@CACHES
@pytest.mark.parametrize(("n", "more"), [(2, 1), (15, 2), (16, 1), (17, 16), (40, 100), (64, 2), (65, 100)])
def test_a_prompt_that_goes_on(make: Make, groups: Any, n: int, more: int) -> None:
    """All that P has is loaded, and what follows is computed; a later turn finds the prefix cache in order."""
    p, d = make(groups, policy="fail"), make(groups, policy="fail")
    text = prompt(n)
    longer = [*text, *answer(text, 1), *prompt(more - 1, seed=3)]
    params = prefill(p, text)
    left = int(any(group.state for group in groups))  # before the last token of a prompt P has no state
    served(d, p, longer, params, more + left)
    offers_nothing(p, d)
    for turn in ([*longer, *answer(longer, 3), 7], [*longer[: max(1, len(longer) // BLOCK * BLOCK)], 9]):
        name = d.add(turn)
        d.run(until=name)
        check(d, name, turn)


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_it_comes_within_the_step(make: Make, wire: Wire, groups: Any) -> None:
    board = Switchboard(waited=wire.pump)
    p, d = make(groups), make(groups, board=board, extra={"step_budget": 1}, policy="fail")
    for seed in range(3):
        longer = [*prompt(N, seed), 5, 6]
        name = d.add(longer, prefill(p, prompt(N, seed)))
        assert d.step().num_scheduled_tokens[name] == 2
        d.run(p, until=name)
        check(d, name, longer)
        offers_nothing(p, d)


@CACHES
@pytest.mark.parametrize("more", [0, 1, 20])
def test_it_is_loaded_and_offered_on(make: Make, groups: Any, more: int) -> None:
    """What D offers is its own prompt, with what it has computed."""
    p, d, e = (make(groups, policy="fail") for _ in range(3))
    longer = [*prompt(N), *prompt(more, seed=3)]
    name = d.add(longer, {**prefill(p, prompt(N)), "do_remote_decode": True}, n=1)
    d.run(p, until=name)
    d.step()
    params = d.done[name].params
    assert params is not None
    served(e, d, longer, params, 1)
    offers_nothing(p, d)
    offers_nothing(d, e)


@pytest.mark.parametrize("groups", [FULL, ALIGNED], ids=["full", "aligned"])
def test_what_d_has_of_it_is_not_loaded(make: Make, groups: Any) -> None:
    """D has a part of P's prompt in its prefix cache, and then more than all of it."""
    p, d = make(groups, policy="fail"), make(groups, policy="fail")
    text = prompt(70)
    longer = [*text, *prompt(40, seed=5)]
    d.add([*text[:32], 3], n=2)
    d.run()
    params = prefill(p, text)
    served(d, p, longer, params, 40 + (groups is ALIGNED))
    offers_nothing(p, d)
    again = prefill(p, text)
    name = d.add(longer, again)
    d.run(p, until=name)
    check(d, name, longer)
    offers_nothing(p, d)


@OVERLAP
@CACHES
@pytest.mark.parametrize(
    "other",
    [prompt(N, seed=1), prompt(N)[:-1], prompt(20), prompt(1), [*prompt(N - 1), 3], [3, *prompt(N)[1:], 4, 5]],
    ids=["another", "shorter", "much shorter", "one token", "another end", "another start"],
)
def test_another_prompt_is_computed_at_once(
    make: Make, groups: Any, other: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = make(groups, policy="fail"), make(groups, policy="fail")
    params = prefill(p, prompt(N))
    with caplog.at_level("WARNING", "kvxfer.vllm"):
        served(d, p, other, params, len(other))
    offers_nothing(p, d)
    told = "its prompt does not begin with that of its params" in caplog.text
    assert told == (len(other) > 1) and outcomes(d) == ["digest_differs" if told else "computed"]


def test_p_need_not_wait_for_a_seat_at_d(make: Make) -> None:
    """The request waits for its turn, and what it does not want is free meanwhile."""
    p, d = make(policy="fail"), make(policy="fail", seqs=1)
    d.add(prompt(20, 5), n=400)
    d.step()
    name = d.add(prompt(N, 1), prefill(p, prompt(N)))
    offers_nothing(p, d)
    assert name not in d.computed
    d.run(p)


@OVERLAP
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("groups", [FULL, HYBRID, ALIGNED, DRAFTING], ids=["full", "hybrid", "aligned", "drafting"])
def test_a_second_call_under_the_same_params(make: Make, groups: Any, caching: bool) -> None:
    """As the Responses API makes after a tool: what P had, it has no more, and D knows that."""
    if not caching and groups not in (FULL, HYBRID):
        pytest.skip("these keep their states for the prefix cache")
    p, d = make(groups, policy="fail"), make(groups, policy="fail", caching=caching)
    text = prompt(N)
    params = prefill(p, text)
    served(d, p, text, params, 1)
    for tool in (2, 3):
        text = [*text, *answer(text, 4), *prompt(5, seed=tool)]
        name = d.add(text, params)
        d.run(p, until=name)
        check(d, name, text)
    d.add(prompt(N), params)  # and a retry
    d.run(p)
    assert [done.reason for done in d.done.values()] == ["length"] * 4
    assert outcomes(d) == ["delivered"] + ["computed"] * 3


def test_what_failed_may_be_tried_again(make: Make, wire: Wire) -> None:
    """The link broke before P had heard of it, so that P offers it still: a router's retry is loaded."""
    p, d = make(), make(caching=False)
    params = prefill(p, prompt(N))
    wire.paused = True
    name = d.add(prompt(N), params)
    d.steps(2)
    for load in wire.loads(d):
        why = Outcome(Failure(FailureKind.PEER_LOST, "the link broke"))
        named = load.fetch.transfer, load.agent.loads.pop(load.fetch.handle).fetch.handle
        load.agent.out.append(Ended("consumer", *named, why, 1, 0.01, -1, stages=Stages(1.0, 1.0)))
        load.agent.out.append(Released("consumer", *named))
    wire.paused = False
    d.run(p, until=name)
    served(d, p, prompt(N), params, 1)
    offers_nothing(p, d)


def test_a_prefill_under_an_id_that_was_used_is_loaded(make: Make) -> None:
    """A gateway that sends one id for a session: the offer has the name of an earlier one, and is another."""
    p, d = make(policy="fail"), make(policy="fail", caching=False)
    for _ in range(3):
        served(d, p, prompt(N), prefill(p, prompt(N), name="chatcmpl-session"), 1)
        offers_nothing(p, d)


@pytest.mark.parametrize("first", ["right", "wrong"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "in turn"])
def test_one_that_differs_beside_one_that_does_not(make: Make, first: str, together: bool) -> None:
    """Under the params of one answer; whichever comes first, neither fails, and the right one loads if it is the first."""
    p, d = make(policy="fail"), make(policy="fail", caching=False)
    params = prefill(p, prompt(N))
    texts = [prompt(N), prompt(N, 1)]
    names = []
    for text in texts if first == "right" else texts[::-1]:
        names.append((d.add(text, params), text))
        if not together:
            d.run(p)
    d.run(p)
    for name, text in names:
        check(d, name, text)
    assert d.computed[names[0][0]] == (1 if first == "right" else N) + 3
    offers_nothing(p, d)


def test_samples_of_one_longer_prompt_share_a_load(make: Make) -> None:
    p, d = make(policy="fail"), make(policy="fail")
    text = prompt(64)
    longer = [*text, 5, 6, 7]
    params = prefill(p, text)
    names = [d.add(longer, params, name=f"{i}_cmpl-abc-0") for i in range(4)]
    d.run(p)
    for name in names:
        check(d, name, longer)
    assert outcomes(d).count("delivered") == 1 and sum(d.computed[name] for name in names) == 4 * (3 + 3)
    offers_nothing(p, d)


def test_a_batch_has_the_params_of_its_first_prompt(make: Make) -> None:
    """Their digest and their count say nothing of the others."""
    p, d = make(policy="fail"), make(policy="fail")
    texts = [prompt(N - 7 * i, seed=i) for i in range(4)]
    offered = [p.add(t, {"do_remote_decode": True}, n=1, name=f"cmpl-job-{i}") for i, t in enumerate(texts)]
    p.run(until=offered[-1])
    p.step()
    params = p.done[offered[0]].params
    assert params is not None
    names = [d.add(t, params, name=f"cmpl-other-{i}") for i, t in enumerate(texts)]
    d.run(p)
    for name, text in zip(names, texts, strict=True):
        check(d, name, text)
        assert d.computed[name] == 1 + 3
    offers_nothing(p, d)


WRONG_COUNTS = [0, -1, -(1 << 63), (1 << 64) - 1, N + 1, N - 1, 1, "60", "", 60.0, True, [60], {"a": 1}, "x" * 5000]


@pytest.mark.parametrize("groups", [FULL, ALIGNED], ids=["full", "aligned"])
@pytest.mark.parametrize("count", WRONG_COUNTS, ids=map(str, range(len(WRONG_COUNTS))))
@pytest.mark.parametrize("more", [0, 3])
def test_whatever_a_count_says(make: Make, groups: Any, count: Any, more: int) -> None:
    """A count that was altered on its way costs the load at the most."""
    p, d = make(groups, policy="fail"), make(groups, policy="fail")
    text = [*prompt(N), *[5] * more]
    params = {**prefill(p, prompt(N)), "remote_num_tokens": count}
    name = d.add(text, params)
    d.run(p, until=name)
    check(d, name, text)
    offers_nothing(p, d)


@pytest.mark.parametrize("lost", [["remote_num_tokens"], ["kvxfer_facts"], ["remote_request_id"], ["kvxfer_digest"]])
def test_a_producer_that_says_less(make: Make, lost: list[str]) -> None:
    """An older one, or a router that withholds: prompts that are equal are loaded as ever."""
    p, d = make(policy="fail"), make(policy="fail")
    params = prefill(p, prompt(N))
    for key in lost:
        del params[key]
    served(d, p, prompt(N), params, 1)
    offers_nothing(p, d)


@pytest.mark.parametrize(
    "digest", ["", "zz", "00" * 16, "00" * 65, 7, None, ["00"], "0" * 5000], ids=map(str, range(8))
)
def test_whatever_a_digest_says(make: Make, digest: Any) -> None:
    p, d = make(policy="fail"), make(policy="fail")
    params = {**prefill(p, prompt(N)), "kvxfer_digest": digest}
    name = d.add(prompt(N), params)
    d.run(p, until=name)
    check(d, name, prompt(N))
    p.lease_ends()  # where it was made up, P learns nothing


def part(told: Told, whole: int = 10, left: int = 0) -> CommonPart:
    digest = lambda n: b"%d" % n  # noqa: E731
    return common_part(told, "ours", whole=whole, most=whole - 1, left=left, content=digest(whole), digest=digest)


@pytest.mark.parametrize(
    ("told", "left", "expected"),
    [
        (Told(), 0, CommonPart(b"10", 9)),
        (Told(b"10"), 0, CommonPart(b"10", 9)),
        (Told(b"10", 10), 0, CommonPart(b"10", 9)),
        (Told(b"10", 9), 1, CommonPart(b"10", 9)),
        (Told(b"4", 4), 0, CommonPart(b"4", 4)),
        (Told(b"4", 3), 1, CommonPart(b"4", 3)),
        (Told(b"4", 4), 1, CommonPart(b"4", 0, differs=True)),
        (Told(b"11", 11), 0, CommonPart(b"11", 0, differs=True)),
        (Told(b"x", 10), 0, CommonPart(b"x", 0, differs=True)),
        (Told(b"x", 10, "ours"), 0, CommonPart(b"x", 0, differs=True)),
        (Told(b"x", 10, "theirs"), 0, CommonPart(b"10", 9)),
        (Told(b"x", 4, "theirs"), 0, CommonPart(b"10", 9)),
        (Told(b"x", 11, "theirs"), 0, CommonPart(b"10", 9)),
        (Told(b"", 4), 0, CommonPart(b"4", 4)),
        (Told(b"", 11), 0, CommonPart(b"10", 9)),
    ],
)
def test_what_is_loaded(told: Told, left: int, expected: CommonPart) -> None:
    """If the engines' facts differ, the load is made all the same, so that its failure names them."""
    assert part(told, left=left) == expected
