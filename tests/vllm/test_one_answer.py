"""One HTTP answer, many requests of the engine: samples of a prompt, batches, and requests under one id that a client has chosen.

Whatever is asked for, its KV moves or the log says why not, and nothing is held once all is answered.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.schedule.coverage import Coverage
from tests.vllm.cases import CACHES, OFFER, both, check, prefill
from tests.vllm.engine import STATEFUL, PlayedEngine, prompt

Make = Callable[..., PlayedEngine]


def settle(*engines: PlayedEngine, until: Callable[[], bool] = lambda: True) -> None:
    """Make some steps, and more until something is true, or 20 s are over."""
    end = time.monotonic() + 20
    steps = 0
    while steps < 40 or (not until() and time.monotonic() < end):
        steps += 1
        time.sleep(0.002)  # what engines tell each other goes through real sockets
        for engine in engines:
            engine.step()


def answered(d: PlayedEngine, at_d: list[str], texts: list[list[int]], *others: PlayedEngine) -> None:
    """Engines go on until D has answered, and it was right."""
    settle(d, *others, until=lambda: set(at_d) <= d.done.keys())
    for name, text in zip(at_d, texts, strict=True):
        check(d, name, text)


def clean(*engines: PlayedEngine) -> None:
    """Nothing is held, and no lease was waited for."""
    settle(*engines, until=lambda: all(engine.free == engine.room for engine in engines))
    for engine in engines:
        assert engine.free == engine.room, "blocks are held"
        engine.assert_clean()


@CACHES
def test_a_sample_that_comes_late_offers_nothing_that_was_read(make: Make, groups: Any) -> None:
    """n > 1 at P, whose router asks D at once: D may be done before vLLM schedules the last sample."""
    p, d = make(groups), make(groups)
    text, at = prompt(90), 7.0
    offers, loads = both(p, "room-1")
    first = p.add(text, offers, n=1, name="0_cmpl-abc-0-86a9ce7b", arrival_time=at)
    loaded = d.add(text, loads)
    d.run(p)
    check(d, loaded, text)
    late = p.add(text, offers, n=1, name="1_cmpl-abc-0-86a9ce7b", arrival_time=at)
    p.run()
    assert {first, late} <= set(p.done)
    clean(p, d)


def test_a_retry_offers_again_what_was_read(make: Make) -> None:
    p = make()
    text = prompt(90)
    offers, loads = both(p, "room-1")
    for at in (7.0, 8.0):
        p.add(text, offers, n=1, name="0_cmpl-abc-0-86a9ce7b", arrival_time=at)
        d = make()
        name = d.add(text, loads)
        d.run(p)
        check(d, name, text)
        assert d.loaded == 89
        clean(p, d)  # its end has been heard of


@pytest.mark.parametrize("count", [2, 4, 8])
def test_samples_share_one_offer_and_any_of_them_tells_it(make: Make, count: int) -> None:
    p, d = make(), make()
    text = prompt(50)
    at_p = p.samples(text, OFFER, count, n=1, name="chatcmpl-x")
    p.run(until=at_p[-1])
    params = [p.done[name].params for name in at_p]
    assert all(said is not None for said in params), "vLLM relays those of the one that ends last"
    assert len({(said["kvxfer_transfer"], said["kvxfer_digest"], said["remote_request_id"]) for said in params}) == 1
    at_d = d.samples(text, params[-1], count, name="chatcmpl-y")
    for name in at_d:
        d.run(p, until=name)
        check(d, name, text)
    assert d.loaded > 0
    clean(p, d)


def test_the_sample_whose_blocks_are_offered_may_fail(make: Make) -> None:
    p, d = make(budget=16), make()
    text = prompt(50)
    first, second = p.samples(text, OFFER, 2, n=1, name="cmpl-x-0")
    p.step()
    p.abort(first)
    p.run(until=second)
    params = p.done[second].params
    assert params is not None
    name = d.add(text, params)
    d.run(p, until=name)
    check(d, name, text)
    assert d.loaded > 0
    clean(p, d)


@pytest.mark.parametrize("one_at", [0, 1, 2])
def test_a_batch_with_a_prompt_of_one_token(make: Make, one_at: int) -> None:
    p, d = make(), make()
    texts = [prompt(50 + i, seed=i) for i in range(3)]
    texts[one_at] = [7]
    params, _ = batch(p, texts)
    at_d = [d.add(text, params, name=f"cmpl-abc-{i}") for i, text in enumerate(texts)]
    answered(d, at_d, texts, p)
    clean(p, d)


def batch(p: PlayedEngine, texts: list[list[int]], name: str = "cmpl-abc") -> tuple[dict[str, object], list[str]]:
    """Have P compute a batch; what vLLM tells of it, and the ids."""
    at_p = [p.add(text, OFFER, n=1, name=f"{name}-{i}") for i, text in enumerate(texts)]
    for one in at_p:
        p.run(until=one)
    p.steps(3)
    params = p.done[at_p[0]].params
    assert params is not None
    return params, at_p


def test_a_batch_that_the_front_end_rejects_is_given_up_whole(make: Make) -> None:
    p, d = make(), make()
    params, _ = batch(p, [prompt(50 + i, seed=i) for i in range(3)])
    assert p.free < p.room
    d.reject([], params, "cmpl-abc")
    clean(p, d)


def test_batches_under_one_id_are_told_apart_by_their_arrival(make: Make) -> None:
    """Whatever the order in which their prompts come; vLLM's front end notes one time for all of an HTTP request."""
    p, d = make(), make()
    texts = [[prompt(40 + i, seed=10 * j + i) for i in range(2)] for j in range(2)]
    at_p = [
        [p.add(one[i], OFFER, n=1, name=f"cmpl-abc-{i}", arrival_time=float(j)) for j, one in enumerate(texts)]
        for i in range(2)
    ]
    for name in (*at_p[0], *at_p[1]):
        p.run(until=name)
    d.reject([], p.done[at_p[0][0]].params, "cmpl-abc")
    params = p.done[at_p[0][1]].params
    at_d = [d.add(text, params, name=f"cmpl-abc-{i}") for i, text in enumerate(texts[1])]
    answered(d, at_d, texts[1], p)
    assert d.loaded == sum(len(text) - 1 for text in texts[1])
    clean(p, d)


def test_batches_under_one_id_do_not_give_each_other_up(make: Make) -> None:
    """If it is unclear which prompts belong together, what is rejected waits for its lease."""
    p, d = make(), make()
    texts = [[prompt(40 + i, seed=10 * j + i) for i in range(2)] for j in range(2)]
    at_p = [[p.add(text, OFFER, n=1, name=f"cmpl-abc-{i}") for i, text in enumerate(one)] for one in texts]
    for name in (*at_p[0], *at_p[1]):
        p.run(until=name)
    d.reject([], p.done[at_p[0][0]].params, "cmpl-abc")
    params = p.done[at_p[1][0]].params
    at_d = [d.add(text, params, name=f"cmpl-abc-{i}") for i, text in enumerate(texts[1])]
    answered(d, at_d, texts[1], p)
    assert d.loaded == sum(len(text) - 1 for text in texts[1])
    p.lease_ends()
    clean(p, d)


@pytest.mark.parametrize("groups", [STATEFUL], ids=["stateful"])
def test_a_recurrent_model_whose_first_prompt_has_one_token(make: Make, groups: object) -> None:
    p, d = make(groups), make(groups)
    texts = [[7], prompt(50), prompt(60, seed=3)]
    params, _ = batch(p, texts)
    at_d = [d.add(text, params, name=f"cmpl-abc-{i}") for i, text in enumerate(texts)]
    answered(d, at_d, texts, p)
    assert d.loaded > 0
    clean(p, d)


def test_requests_under_one_id_are_offered_each(make: Make) -> None:
    p, d = make(), make()
    texts = [prompt(30 + i, seed=i) for i in range(5)]
    at_p = [p.add(text, OFFER, n=1, name="chatcmpl-session") for text in texts]
    p.run(until=at_p[-1])
    at_d = [d.add(text, p.done[name].params, name="chatcmpl-session") for text, name in zip(texts, at_p, strict=True)]
    for name, text in zip(at_d, texts, strict=True):
        d.run(p, until=name)
        check(d, name, text)
    assert d.loaded == sum(len(text) - 1 for text in texts)
    clean(p, d)


@pytest.mark.parametrize("engines", [1, 2])
def test_one_prompt_twice_under_one_id_at_once(make: Make, engines: int) -> None:
    """Each answer may go to an engine of its own; if both go to one, that says so."""
    p, ds = make(), [make() for _ in range(engines)]
    text = prompt(50)
    at_p = [p.add(text, OFFER, n=1, name="chatcmpl-session") for _ in range(2)]
    p.run(until=at_p[-1])
    at_d = [(ds[i % engines], ds[i % engines].add(text, p.done[name].params)) for i, name in enumerate(at_p)]
    settle(p, *ds, until=lambda: all(name in d.done for d, name in at_d))
    for d, name in at_d:
        check(d, name, text)
    assert all(d.loaded for d in ds)
    clean(p, *ds)


def test_a_retry_under_the_id_of_an_answer_that_was_lost(make: Make) -> None:
    p, d = make(), make()
    text = prompt(50)
    prefill(p, text, name="chatcmpl-session")
    params = prefill(p, text, name="chatcmpl-session")
    other = prefill(p, prompt(40, seed=5), name="chatcmpl-session")
    for said, one in ((params, text), (other, prompt(40, seed=5))):
        name = d.add(one, said)
        d.run(p, until=name)
        check(d, name, one)
    assert d.loaded == 49 + 39
    clean(p, d)


def test_streaming_input_is_not_offered_and_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    p = make()
    with caplog.at_level(logging.WARNING, "kvxfer"):
        name = p.add(prompt(30), OFFER, n=1, resumable=True)
        p.steps(4)
    assert "not offered to other engines" in caplog.text and "streaming input" in caplog.text
    p.abort(name)
    clean(p)


def told(engine: PlayedEngine) -> dict[str, int]:
    """How many requests were not offered, by reason, as vLLM hears it."""
    engine.step()
    found: Counter[str] = Counter()
    for stats in engine.stats:
        found.update(stats["not_offered"])
    return dict(found)


@pytest.mark.parametrize("groups", [STATEFUL], ids=["stateful"])
def test_what_is_not_offered_is_counted_and_logged_by_reason(
    make: Make, groups: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, only_loads = make(groups), make(role="kv_consumer")
    with caplog.at_level(logging.WARNING, "kvxfer"):
        for text in ([7], [8], prompt(50)):
            if text[1:]:
                monkeypatch.setattr(Coverage, "unusable", lambda *_: "it has too few blocks")
            name = p.add(text, OFFER, n=1)
            p.run(until=name)
            assert p.done[name].params is None
        name = only_loads.add(prompt(30), OFFER, n=1)
        only_loads.run(until=name)
    assert told(p) == {"nothing": 2, "given_up": 1} and told(only_loads) == {"wrong_role": 1}
    lines = [record.getMessage() for record in caplog.records if "not offered" in record.getMessage()]
    assert [line.partition("(")[2].partition(")")[0] for line in lines] == ["nothing", "given_up"]


def test_lines_about_what_is_not_offered_are_bounded(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    p = make()
    with caplog.at_level(logging.WARNING, "kvxfer"):
        names = [p.add(prompt(30, seed=i), OFFER, n=1, resumable=True) for i in range(20)]
        p.steps(8)
    assert told(p) == {"streaming_input": 20}
    assert len([record for record in caplog.records if "not offered" in record.getMessage()]) == 1
    for name in names:
        p.abort(name)
    clean(p)


def test_samples_and_lists_that_may_be_on_several_ranks_are_refused_by_name(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one of the ranks is named in the answer, and what the others offered would wait for its lease."""
    p, d = make(spread=True), make()
    with caplog.at_level(logging.WARNING, "kvxfer"):
        for name in p.samples(prompt(50), OFFER, 2, n=1, name="chatcmpl-x"):
            p.run(until=name)
            assert p.done[name].params is None
        texts = [prompt(50 + i, seed=i) for i in range(3)]
        params, _ = batch(p, texts)
        at_d = [d.add(text, params, name=f"cmpl-abc-{i}") for i, text in enumerate(texts)]
        answered(d, at_d, texts, p)
    assert told(p) == {"data_parallel": 4} and "data-parallel ranks" in caplog.text
    assert d.loaded == len(texts[0]) - 1
    clean(p, d)


def test_a_decode_engine_that_needs_nothing_may_say_so_before_prefill_begins(make: Make) -> None:
    """As for a prompt of one token, if the router sends to both at once."""
    p, d = make(), make()
    to_d = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": p.address.host, "remote_port": p.address.port}
    name = d.add([7], to_d, name="cmpl-abc-0")
    d.run(until=name)
    check(d, name, [7])
    settle(d, p)
    p.run(until=p.add([7], {"do_remote_decode": True, "transfer_id": "t"}, n=1, name="cmpl-abc-0"))
    clean(p, d)


@pytest.mark.parametrize("samples", [False, True], ids=["list", "samples"])
def test_a_client_that_hangs_up_while_some_of_a_list_are_done(make: Make, samples: bool) -> None:
    p = make(seqs=1)
    if samples:
        at_p = p.samples(prompt(50), OFFER, 3, n=1, name="cmpl-abc-0")
    else:
        at_p = [p.add(prompt(50 + i, seed=i), OFFER, n=1, name=f"cmpl-abc-{i}") for i in range(3)]
    p.run(until=at_p[0])
    left = [name for name in at_p if name not in p.done]
    assert left, "all are done"
    for name in left:
        p.abort(name)
    clean(p)


def test_a_client_that_hangs_up_leaves_the_answer_to_another_of_its_requests_alone(make: Make) -> None:
    p, d = make(seqs=1), make()
    text = prompt(50)
    params = prefill(p, text, name="cmpl-abc-0")
    again = [p.add(one, OFFER, n=1, name=f"cmpl-abc-{i}", arrival_time=7.0) for i, one in enumerate((text, prompt(60)))]
    p.run(until=again[0])
    p.abort(again[1])
    settle(p)
    name = d.add(text, params, name="cmpl-abc-0")
    d.run(p, until=name)
    check(d, name, text)
    assert d.loaded == 49
    clean(p, d)
