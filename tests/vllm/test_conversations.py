"""Conversations: at each turn P loads what D has computed at the last one, and whatever a router or a client does, tokens are right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvxfer.engine import SchedulerSide
from kvxfer.values import BlockTable
from tests.engine.direct import Switchboard
from tests.vllm.cases import CACHES, OFFER, check, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import ALIGNED, BLOCK, FULL, HYBRID, Group, PlayedEngine, answer, ours, prompt
from tests.vllm.wire import Wire

overlap = both_ways


Schema = Callable[[PlayedEngine, dict[str, Any]], dict[str, Any]]


def nixl(d: PlayedEngine, told: dict[str, Any]) -> dict[str, Any]:
    """vLLM's example router for conversations: what D has answered, with the host of D's HTTP server."""
    return {**told, "remote_host": "decode.example", "do_remote_decode": True, "do_remote_prefill": False}


def tier(d: PlayedEngine, told: dict[str, Any]) -> dict[str, Any]:
    """llm-d: where a peer listens, beside NIXL's keys."""
    here = d.address
    return {**OFFER, "remote_kv_source": {"kv_request_id": "x", "remote_host": here.host, "remote_port": here.port}}


def parties(d: PlayedEngine, told: dict[str, Any]) -> dict[str, Any]:
    """vLLM's peer-to-peer tier: the only pair that it allows. The router names the transfer to D."""
    return {**tier(d, told), "do_remote_decode": None, "remote_decoder": {"kv_request_id": "job"}}


def hint(d: PlayedEngine, told: dict[str, Any]) -> dict[str, Any]:
    """Dynamo."""
    payload = {"source_control_endpoint": f"tcp://{d.address}", "block_hashes": [1, 2]}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {**OFFER, "kv_hint": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


def named(*engines: PlayedEngine) -> dict[str, Any]:
    return {**OFFER, "kvxfer_sources": [str(e.address) for e in engines]}


SCHEMAS = pytest.mark.parametrize("schema", [nixl, tier, hint], ids=lambda schema: schema.__name__)


def ask(
    p: PlayedEngine, text: list[int], params: dict[str, Any], *others: PlayedEngine, n: int = 1, **more: Any
) -> str:
    """Have an engine compute a prompt; the id of its request, whose first tokens were right. Who offers a state computes no answer."""
    name = p.add(text, params, n=n, **more)
    p.run(*others, until=name)
    if not params.get("do_remote_decode") or not any(g.state for g in p.groups):
        check(p, name, text, n)
    return name


def turn(
    p: PlayedEngine, d: PlayedEngine, text: list[int], to_p: dict[str, Any], *others: PlayedEngine, n: int = 20
) -> tuple[int, dict[str, Any]]:
    """One turn through P and D: how many tokens P has computed, and what D has told."""
    first = ask(p, text, to_p, d, *others)
    told = p.done[first].params
    assert told is not None and told["do_remote_prefill"]
    name = ask(d, text, told, p, *others, n=n)
    assert d.done[name].params is not None
    return p.computed[first], d.done[name].params  # type: ignore[return-value]


def rest(*engines: PlayedEngine) -> None:
    """Let engines come to rest, whatever was asked or offered and is not wanted any more."""
    deadline = time.monotonic() + 60.0
    while any(engine.busy for engine in engines):
        assert time.monotonic() < deadline, "the engines do not come to rest"
        for engine in engines:
            if engine.busy:
                engine.step()
            engine.lease_ends()


def whole(tokens: int, block: int = BLOCK) -> int:
    """Tokens in whole blocks."""
    return tokens // block * block


@SCHEMAS
@CACHES
def test_p_computes_what_is_new(make: Make, groups: Any, schema: Schema) -> None:
    """And D loads what it lacks. What a cache does not keep for prefix hits, nobody can ask for."""
    p, d = make(groups, blocks=120), make(groups, blocks=120)
    kept = d.config.cache_config.enable_prefix_caching and not any(g.chunk for g in groups)
    text, had = prompt(50), 0
    to_p = OFFER
    for number in range(5):
        before = d.loaded
        computed, told = turn(p, d, text, to_p)
        if number and kept:
            assert computed <= len(text) - whole(had)
            assert d.loaded - before <= len(text) - whole(had) + BLOCK
        assert told["do_remote_decode"] and not told["do_remote_prefill"] and told["remote_block_ids"]
        assert told["remote_num_tokens"] == len(text) + 20 - 1
        had = len(text) + 20 - 1
        text = text + answer(text, 20) + prompt(13, seed=number)
        to_p = schema(d, told)
    assert not kept or p.loaded >= 4 * BLOCK


def test_one_token_moves_a_prefix_ahead_of_its_request(make: Make) -> None:
    """A router that expects a request at an engine sends its prefix there first; the request then finds it in the prefix cache."""
    d, p = make(blocks=120), make(blocks=120)
    prefix = prompt(5 * BLOCK)
    ask(d, prefix, {})
    sources = {"kvxfer_sources": named(d)["kvxfer_sources"]}
    ahead = ask(p, prefix, sources, d)
    assert p.loaded == 4 * BLOCK and len(p.done[ahead].tokens) == 1
    rest(p, d)
    request = ask(p, [*prefix, *prompt(9, seed=3)], {})
    assert p.loaded == 4 * BLOCK and p.computed[request] <= BLOCK + 9, (
        "nothing is loaded, and the prefix is not computed again"
    )
    rest(p, d)


@CACHES
@pytest.mark.parametrize("edit", ["thinking dropped", "a word changed", "another answer", "all changed"])
def test_histories_that_a_client_has_edited(make: Make, groups: Any, edit: str) -> None:
    """Only what is common is loaded, to a block."""
    p, d = make(groups, blocks=120), make(groups, blocks=120)
    kept = d.config.cache_config.enable_prefix_caching and not any(g.state for g in groups)
    text = prompt(75)
    _, told = turn(p, d, text, OFFER, n=40)
    said = answer(text, 40)
    common, after = {
        "thinking dropped": (75, text + said[25:]),
        "a word changed": (37, [*text[:37], 950, *text[38:], *said]),
        "another answer": (75, text + prompt(40, seed=9)),
        "all changed": (0, prompt(115, seed=5)),
    }[edit]
    before = p.loaded
    computed, _ = turn(p, d, after + prompt(10, seed=2), nixl(d, told))
    assert p.loaded - before <= common
    if kept:
        assert computed <= len(after) + 10 - whole(common)


def test_a_replica_that_computes_it_just_now(make: Make) -> None:
    """What the other engine's running request has computed so far counts, too."""
    p, other = make(blocks=120), make(budget=32, blocks=120)
    text = prompt(150)
    running = other.add(text, OFFER, n=1)
    other.steps(3)
    name = ask(p, text, named(other), other)
    assert p.computed[name] <= 150 - 64
    other.run(p, until=running)
    check(other, running, text, 1)
    for engine in (p, other):
        engine.lease_ends()


def test_nobody_asks_himself(make: Make) -> None:
    p = make()
    name = ask(p, prompt(100), named(p))
    assert p.computed[name] == 100
    p.lease_ends()


def test_a_plain_request_asks_as_well(make: Make) -> None:
    """`remote_kv_source` alone: nobody else is to have it."""
    p, d = make(), make()
    text = prompt(100)
    ask(d, text, OFFER)
    d.lease_ends()
    name = ask(p, text, {"remote_kv_source": tier(d, {})["remote_kv_source"]}, d, n=4)
    assert p.computed[name] <= 100 - 96 + 3
    assert p.done[name].params is not None and not p.done[name].params["do_remote_prefill"]


def test_with_the_transfer_named_by_the_router(make: Make) -> None:
    """`remote_decoder` and `remote_kv_source`: P loads from one engine, and another loads from P."""
    p, d, other = make(), make(), make()
    text = prompt(100)
    ask(other, text[:80], OFFER)
    other.lease_ends()
    first = ask(p, text, parties(other, {}), other)
    assert p.computed[first] <= 100 - 80
    here = p.address
    name = ask(
        d,
        text,
        {"remote_prefiller": {"kv_request_id": "job", "remote_host": here.host, "remote_port": here.port}},
        p,
        n=4,
    )
    assert d.computed[name] == 1 + 3


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@CACHES
def test_a_source_that_is_lost_amid_the_load(make: Make, wire: Wire, groups: Any, policy: str) -> None:
    """The prompt is computed, also where vLLM is to fail requests whose loads fail."""
    p, d = make(groups, policy=policy, blocks=120), make(groups, blocks=120)
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    p.scheduler.reset_prefix_cache()
    longer = text + answer(text, 20) + prompt(5)
    wire.paused = True
    name = p.add(longer, nixl(d, told), n=1)
    while name not in p.done:
        p.step()
        if d.busy:
            d.step()
        for load in wire.loads(p):
            wire.scribble(load)
            wire.fail(load, "the source is gone")
    wire.paused = False
    if not any(g.state for g in groups):
        check(p, name, longer, 1)
    assert p.done[name].reason == "length"
    assert p.done[name].params is not None
    for engine in (p, d):
        engine.lease_ends()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("asks", [True, False], ids=["asked", "told"])
def test_a_load_that_cannot_begin(make: Make, monkeypatch: pytest.MonkeyPatch, policy: str, asks: bool) -> None:
    """It costs its own request what a load that fails would: nothing, where the request only asked."""
    p, d = make(policy=policy, blocks=120), make(blocks=120)
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    p.scheduler.reset_prefix_cache()
    longer = text + answer(text, 20) + prompt(5)
    allocated = SchedulerSide.allocated

    def too_many(side: SchedulerSide, request: str, table: BlockTable, external: int) -> None:
        allocated(side, request, table, external and external + 1)

    monkeypatch.setattr(SchedulerSide, "allocated", too_many)
    name = p.add(longer, nixl(d, told) if asks else prefill(d, longer), n=1)
    p.run(d, until=name)
    assert p.done[name].reason == ("error" if policy == "fail" and not asks else "length")
    if p.done[name].reason == "length":
        check(p, name, longer, 1)
    for engine in (p, d):
        engine.lease_ends()


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_is_aborted_at_any_step(make: Make, wire: Wire, n: int) -> None:
    p, d = make(blocks=120), make(blocks=120)
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    longer = text + answer(text, 20) + prompt(5)
    for steps in range(6):
        p.scheduler.reset_prefix_cache()
        name = p.add(longer, nixl(d, told), n=n)
        for _ in range(steps):
            p.step()
            if d.busy:
                d.step()
        p.abort(name)
        rest(p, d)
    rest(p, d)


def test_a_source_whose_cache_was_reset(make: Make) -> None:
    p, d = make(), make()
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    for engine in (p, d):
        assert engine.scheduler.reset_prefix_cache()
    computed, _ = turn(p, d, text + prompt(10), nixl(d, told))
    assert computed == 110


def test_a_source_with_other_weights(make: Make) -> None:
    """Its facts have changed, so what it has is another's."""
    p, d = make(), make()
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    assert d.scheduler.reset_prefix_cache(reset_connector=True)
    ask(d, text, {}, n=1)
    p.scheduler.reset_prefix_cache()
    name = ask(p, text, nixl(d, told), d)
    assert p.computed[name] == 100
    p.lease_ends()


def test_a_source_whose_cache_is_full(make: Make) -> None:
    """What was evicted is computed; and what is taken for another does not stop the source's own requests."""
    p, d = make(blocks=120), make(blocks=20)
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    for seed in range(3):
        ask(d, prompt(200, seed=30 + seed), {}, n=4)
    longer = text + answer(text, 20) + prompt(5)
    p.scheduler.reset_prefix_cache()
    name = p.add(longer, nixl(d, told), n=1)
    busy = d.add(prompt(250, seed=50), None, n=20)
    p.run(d, until=name)
    check(p, name, longer, 1)
    d.run(p, until=busy)
    check(d, busy, prompt(250, seed=50), 20)
    for engine in (p, d):
        engine.lease_ends()


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_other_block_sizes(make: Make, theirs: int, ours: int) -> None:
    p, d = make(blocks=120, turns=ours), make(blocks=120, turns=theirs)
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    p.scheduler.reset_prefix_cache()
    longer = text + answer(text, 20) + prompt(5)
    name = ask(p, longer, nixl(d, told), d)
    assert p.computed[name] <= len(longer) - whole(119, BLOCK * theirs)
    for engine in (p, d):
        engine.lease_ends()


@pytest.mark.parametrize("window", [16, 17, 18, 32, 33, 48])
def test_windows_of_any_length(make: Make, window: int) -> None:
    """A window that ends at a block's edge needs no block before it."""
    groups = (Group(), Group(window=window))
    p, d = make(groups, blocks=120), make(groups, blocks=120)
    for seed, n in enumerate((64, 71, 80, 97)):
        text = prompt(n, seed=seed)
        _, told = turn(p, d, text, OFFER)
        p.scheduler.reset_prefix_cache()
        longer = text + answer(text, 20) + prompt(5)
        name = ask(p, longer, nixl(d, told), d)
        assert p.computed[name] <= len(longer) - whole(n + 19)
        for engine in (p, d):
            engine.lease_ends()


@pytest.mark.parametrize("groups", [(Group(), Group(window=32)), (Group(window=32),)], ids=["hybrid", "window"])
def test_windows_that_vllm_keeps_at_the_ends_of_prompts_only(make: Make, groups: Any) -> None:
    """As it does by default; the end of an answer is found all the same."""
    p, d = make(groups, blocks=120), make(groups, blocks=120)
    for engine in (p, d):
        engine.scheduler.kv_cache_manager.coordinator.retention_interval = 0
    for n in (64, 75):
        text = prompt(n, seed=n)
        _, told = turn(p, d, text, OFFER, n=40)
        longer = text + answer(text, 40) + prompt(5)
        computed, _ = turn(p, d, longer, nixl(d, told))
        assert computed <= len(longer) - whole(n + 39)
    rest(p, d)


def test_a_salt_is_found_by_who_states_it(make: Make) -> None:
    p, d = make(), make()
    text = prompt(100)
    ask(d, text, OFFER, cache_salt="mine")
    d.lease_ends()
    for salt, computed in ((None, 100), ("theirs", 100), ("mine", 4)):
        name = ask(p, text, named(d), d, cache_salt=salt)
        assert p.computed[name] == computed
        p.lease_ends()


@pytest.mark.parametrize("groups", [FULL, HYBRID, ALIGNED], ids=["full", "hybrid", "aligned"])
def test_another_engine_goes_on_with_an_answer(make: Make, groups: Any) -> None:
    """D1's client was sent to D2, with the prompt and what it has of the answer."""
    p, d1, d2 = (make(groups, blocks=120) for _ in range(3))
    text = prompt(60)
    first = ask(p, text, OFFER)
    name = d1.add(text, p.done[first].params, n=60)
    while len(d1.said.get(name, ())) < 40:
        for engine in (d1, p):
            if engine.busy:
                engine.step()
    d1.abort(name)
    d1.run(p)
    longer = text + answer(text, 40)
    there = d1.address
    params = {"remote_kv_source": {"kv_request_id": "x", "remote_host": there.host, "remote_port": there.port}}
    again = ask(d2, longer, params, d1, n=20)
    assert d2.computed[again] <= len(longer) - whole(len(longer) - 1) + BLOCK + 19


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(make: Make, role: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever consumes may ask; any engine may be asked."""
    p, d = make(role=role), make(role="kv_consumer")
    text = prompt(100)
    ask(d, text, {})
    plain = {"kvxfer_sources": [str(d.address)]}
    for seed in range(2):
        name = ask(p, text + prompt(20, seed=seed), plain, d)
        assert p.computed[name] == (20 + 4 if role == "kv_consumer" else 120) - (
            96 * (role != "kv_consumer") if seed else 0
        )
    assert ("kv_role does not allow" in caplog.text) == (role == "kv_producer")


def test_a_hint_that_is_not_used_is_said_once_with_its_key(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Beside a load of the whole prompt, under each schema, and by an engine that only produces."""
    p, d, producer = make(), make(), make(role="kv_producer")
    here = {"remote_host": d.address.host, "remote_port": d.address.port}
    for seed in range(2):
        text = prompt(60, seed=seed)
        told = p.done[ask(p, text, OFFER)].params
        ask(d, text, {**told, "kvxfer_sources": [str(producer.address)]}, p, producer)  # type: ignore[dict-item]
        ask(producer, text, {**OFFER, **here})
        ask(producer, prompt(60, seed=seed + 7), tier(d, {}))
    rest(p, d, producer)
    notes = [line for line in caplog.messages if "kvxfer does not use it" in line]
    assert [note.split()[1] for note in notes] == ["kvxfer_sources", "remote_host", "remote_kv_source"]
    assert "the engine from which the whole prompt is loaded" in notes[0] and "kv_role does not allow" in notes[1]


@SCHEMAS
@pytest.mark.parametrize("who", [{}, {"peers": ("127.0.0.1",)}], ids=["anybody", "peers"])
def test_sources_are_dialled_only_if_the_operator_says_who_they_may_be(
    make: Make, schema: Schema, who: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What a request names could be a client's own engine, whose KV this one would keep for all others."""
    p, d = make(extra={"trust_sources": False, **who}), make()
    text = prompt(60)
    told = turn(p, d, text, OFFER)[1]
    turn(p, d, text + answer(text, 20), schema(d, told))
    assert bool(p.loaded) is bool(who)
    assert bool(ours(d.scheduler.connector)._sched.side.answered.inquiries) is bool(who)
    assert ("'trust_sources'" in caplog.text) is not bool(who)


def test_whoever_does_not_want_to_be_told(make: Make) -> None:
    p, d = make(), make(extra={"decode_answers": False})
    text = prompt(60)
    first = ask(p, text, OFFER)
    name = ask(d, text, p.done[first].params or {}, p, n=4)
    assert d.done[name].params is None


def test_answers_that_are_kept_for_a_while(make: Make) -> None:
    """As the operator asks; the engine's own requests come first, and nothing is kept for ever."""
    p, d = make(blocks=120), make(blocks=100, extra={"keep_answers": 1000.0})
    text = prompt(100)
    _, told = turn(p, d, text, OFFER)
    p.scheduler.reset_prefix_cache()
    for seed in range(3):  # which would evict the answer
        ask(d, prompt(700, seed=30 + seed), {}, n=4)
    longer = text + answer(text, 20) + prompt(5)
    name = ask(p, longer, nixl(d, told), d)
    assert p.computed[name] <= len(longer) - whole(119)
    busy = d.add(prompt(1300, seed=50), None, n=20)
    d.run(p, until=busy)
    assert not d.preempted
    check(d, busy, prompt(1300, seed=50), 20)
    assert len(ours(d.scheduler.connector)._sched._answers) == 0
    assert d.scheduler.reset_prefix_cache()
    p.lease_ends()


def test_requests_of_their_own_end_as_ever(make: Make) -> None:
    """Without params nothing is told, and a request that failed tells nothing either."""
    d = make()
    assert d.done[ask(d, prompt(40), {}, n=4)].params is None
    name = d.add(prompt(40), {"kvxfer_sources": []}, n=50)
    d.steps(3)
    d.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    d.run()


@CACHES
def test_many_conversations_at_once(make: Make, groups: Any) -> None:
    """Of 12 conversations some have the same beginning; none of them is told anything about the others."""
    p, d = make(groups, blocks=300, seqs=16), make(groups, blocks=300, seqs=16)
    texts = [prompt(40, seed=0) + prompt(20, seed=i % 7) for i in range(12)]
    params: list[dict[str, Any]] = [OFFER] * 12
    for number in range(3):
        names = [p.add(text, each, n=1) for text, each in zip(texts, params, strict=True)]
        for name in names:
            p.run(d, until=name)
        ends = [d.add(text, p.done[name].params, n=15) for name, text in zip(names, texts, strict=True)]
        d.run(p)
        for name, text in zip(ends, texts, strict=True):
            check(d, name, text, 15)
        params = [nixl(d, d.done[name].params or {}) for name in ends]
        texts = [text + answer(text, 15) + prompt(8, seed=number) for text in texts]
        if number == 1:
            p.scheduler.reset_prefix_cache()


@pytest.fixture
def near(make: Make, wire: Wire) -> tuple[PlayedEngine, PlayedEngine]:
    """P, which may begin loads before a request has blocks, and has loaded from D before, and D. Their pools are small."""
    p = make(board=Switchboard(waited=wire.pump), extra={"step_budget": 1}, blocks=41)
    d = make(blocks=120)
    ask(d, prompt(40, seed=90), OFFER)
    ask(p, prompt(40, seed=90), {"remote_kv_source": tier(d, {})["remote_kv_source"]}, d)
    rest(p, d)
    return p, d


def again(p: PlayedEngine, d: PlayedEngine, text: list[int]) -> tuple[str, int]:
    """Have P compute what D holds some of; the steps from D's answer until P computes it."""
    name = p.add(text, {"remote_kv_source": tier(d, {})["remote_kv_source"]}, n=4)
    p.step()
    deadline = time.monotonic() + 20.0
    while p.scheduler.connector._sched.side.asking(name):  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        d.step()  # which answers once the question is there
        if name in p.step().num_scheduled_tokens:
            return name, 0
    return name, next(n for n in range(1, 20) if name in p.step().num_scheduled_tokens or d.step() is None)


def test_behind_a_cached_prefix_a_short_load_costs_no_further_step(near: tuple[PlayedEngine, PlayedEngine]) -> None:
    p, d = near
    text = prompt(100)
    ask(p, text[:50], {})
    ask(d, text, OFFER)
    before = p.computed.copy()
    name, steps = again(p, d, text)
    assert steps == 0, "it is computed in the step in which P has heard of it"
    p.run(d, until=name)
    check(p, name, text, 4)
    assert p.computed[name] - before.get(name, 0) <= 100 - 96 + 3
    rest(p, d)


def test_what_is_cached_here_is_not_lent_to_the_load_behind_it(near: tuple[PlayedEngine, PlayedEngine]) -> None:
    """Of all unused blocks, those of the prompt's beginning are the next to be used again."""
    p, d = near
    text = prompt(120)
    first = ask(p, text[:64], {})
    ask(d, text, OFFER)
    cached, unused = p.tables[first][0][:4], p.pool.free_block_queue
    for seed in range(80):
        if unused.get_all_free_blocks()[0].block_id in cached:
            break
        ask(p, prompt(17, seed), {})
    assert unused.get_all_free_blocks()[0].block_id in cached
    name, _ = again(p, d, text)
    p.run(d, until=name)
    check(p, name, text, 4)
    rest(p, d)
