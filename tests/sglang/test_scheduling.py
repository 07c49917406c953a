"""Requests through SGLang's own schedulers, queues, prefix trees and pools, with played forward passes."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.sglang.conftest import PlayedRanks
from tests.sglang.played import PAGE

CHUNK = 2 * PAGE + 5


CACHED = {"disaggregation_decode_enable_radix_cache": True}


@pytest.fixture(scope="module")
def servers(start: Callable[..., Any]) -> Iterator[tuple[PlayedRanks, PlayedRanks]]:
    with start(chunk=CHUNK, args=CACHED) as engines:
        yield engines


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(512), k=tokens)


def served(servers: tuple[PlayedRanks, PlayedRanks], prompts: dict[int, list[int]]) -> dict[int, dict[str, Any]]:
    """Give requests to both servers, by room, and return what decode has in the end."""
    prefill, decode = servers
    for room, tokens in prompts.items():
        prefill.submit(tokens=tokens, room=room), decode.submit(tokens=tokens, room=room)
    ready: set[int] = set()
    turn(servers, lambda: ready == prompts.keys(), ready)
    answers = {}
    for room in prompts:
        told = decode.answer(room=room)
        answers[room] = {**told[0], "right": all(answer["right"] for answer in told)}
        decode.finish(room=room)
    turn(servers, lambda: all({*prefill.state(room=room)} == {"done"} for room in prompts), ready)
    return answers


def turn(servers: tuple[PlayedRanks, PlayedRanks], over: Callable[[], bool], ready: set[int]) -> None:
    """Let both servers run until something is so."""
    prefill, decode = servers
    end = time.monotonic() + 60  # less than SGLang's own deadlines
    while not over():
        assert time.monotonic() < end
        prefill.turn()
        ready.update(decode.turn()[0])
        time.sleep(0.005)


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_prompts_of_any_length_arrive(servers: tuple[PlayedRanks, PlayedRanks], room: int, tokens: int) -> None:
    ids = prompt(tokens, tokens)
    answer = served(servers, {room: ids})[room]
    assert answer["right"] and answer["tokens"] == [sum(ids) % 512]


def test_what_either_server_has_cached_is_not_moved(servers: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    shared = prompt(5 * PAGE, 1000)
    for i, more in enumerate((3, PAGE + 4, 0)):
        ids = shared + prompt(more, 1001 + i)
        answer = served(servers, {room + i: ids})[room + i]
        assert answer["right"] and answer["tokens"] == [sum(ids) % 512]
        assert answer["cached"] == (0 if i == 0 else 5 * PAGE)


def test_many_at_once(servers: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    prompts = {room + i: prompt(20 + 23 * i, 2000 + i) for i in range(6)}
    for one, answer in served(servers, prompts).items():
        assert answer["right"] and answer["tokens"] == [sum(prompts[one]) % 512]


@pytest.mark.parametrize("turns", range(7))
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_aborted_request_frees_what_it_had(
    servers: tuple[PlayedRanks, PlayedRanks], room: int, who: str, turns: int
) -> None:
    prefill, decode = servers
    before = prefill.free(), decode.free()
    ids = prompt(3 * CHUNK, 3000 + room % 1000)
    prefill.submit(tokens=ids, room=room), decode.submit(tokens=ids, room=room)
    ready: set[int] = set()
    for _ in range(turns):
        prefill.turn()
        ready.update(decode.turn()[0])
        time.sleep(0.005)
    (prefill if who == "prefill" else decode).abort(room=room)

    def ended(server: PlayedRanks) -> bool:
        return server.state(room=room) != ["running"]

    turn(servers, lambda: room in ready or (ended(prefill) and ended(decode) and decode.held() == [0]), ready)
    if room in ready:  # it had arrived
        decode.finish(room=room)
        turn(servers, lambda: ended(prefill), ready)
    assert (prefill.free(), decode.free()) == before
    assert served(servers, {room + 1: ids})[room + 1]["right"]


@pytest.mark.slow
def test_prefill_hears_of_a_request_that_decode_aborts_before_it_knows_the_server(
    start: Callable[..., Any], room: int
) -> None:
    """The first request after a start: decode has yet to ask where the prefill ranks are."""
    with start(chunk=CHUNK, args=CACHED) as servers:
        prefill, decode = servers
        prefill.submit(tokens=prompt(CHUNK, 1), room=room), decode.submit(tokens=prompt(CHUNK, 1), room=room)
        decode.abort(room=room)
        turn(servers, lambda: "running" not in prefill.state(room=room) + decode.state(room=room), set())
        assert "the decode server aborted it" in prefill.state(room=room)[0]
        assert served(servers, {room + 1: prompt(CHUNK, 2)})[room + 1]["right"]


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_prefill_hears_of_a_request_that_decode_aborts_before_it_is_at_prefill(
    servers: tuple[PlayedRanks, PlayedRanks], room: int, turns: int
) -> None:
    prefill, decode = servers
    ids = prompt(CHUNK, 1)
    served(servers, {room + 1: ids})
    before = prefill.free(), decode.free()
    decode.submit(tokens=ids, room=room)
    for _ in range(turns):
        decode.turn()
    decode.abort(room=room)
    turn(servers, lambda: decode.state(room=room) != ["running"] and decode.held() == [0], set())
    prefill.submit(tokens=ids, room=room)
    turn(servers, lambda: prefill.state(room=room) != ["running"], set())
    assert "the decode server aborted it" in prefill.state(room=room)[0]
    assert (prefill.free(), decode.free()) == before


@pytest.mark.parametrize("first", [0, 2, 4], ids=["at once", "begun", "under way"])
def test_requests_that_share_a_room_are_not_mixed_up(
    servers: tuple[PlayedRanks, PlayedRanks], room: int, first: int
) -> None:
    """A router that gives two requests one room: the later one fails and says why, and both servers go on."""
    prefill, decode = servers
    before = prefill.free(), decode.free()
    prompts = {room + i: prompt(8 * CHUNK, 6000 + first + i) for i in range(2)}
    ready: set[int] = set()
    for one, tokens in prompts.items():
        prefill.submit(tokens=tokens, room=one, shared=room), decode.submit(tokens=tokens, room=one, shared=room)
        for _ in range(first):
            prefill.turn(), ready.update(decode.turn()[0])
    turn(servers, lambda: room in ready and all("running" not in s.state(room=room + 1) for s in servers), ready)
    told = decode.answer(room=room)
    assert ready == {room} and told[0]["right"] and told[0]["tokens"] == [sum(prompts[room]) % 512]
    assert all("another request" in state for server in servers for state in server.state(room=room + 1))
    decode.finish(room=room)
    turn(servers, lambda: prefill.state(room=room) == ["done"] and not any(decode.held()), ready)
    assert (prefill.free(), decode.free()) == before
    assert served(servers, {room + 2: prompts[room + 1]})[room + 2]["right"]


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (2, 2), (1, 2)])
def test_schedulers_of_several_ranks_stay_together(
    start: Callable[..., Any], room: int, prefill: int, decode: int
) -> None:
    with start(prefill, decode, chunk=CHUNK, args=CACHED) as servers:
        prompts = {room + i: prompt(20 + 41 * i, 4000 + i) for i in range(4)}
        for one, answer in served(servers, prompts).items():
            assert answer["right"] and answer["tokens"] == [sum(prompts[one]) % 512]
        before = [server.free() for server in servers]
        ids = prompt(5 * CHUNK, 4100)
        servers[0].submit(tokens=ids, room=room), servers[1].submit(tokens=ids, room=room)
        for _ in range(4):
            servers[0].turn(), servers[1].turn()
            time.sleep(0.01)
        servers[1].abort(room=room)
        turn(servers, lambda: "running" not in servers[1].state(room=room) + servers[0].state(room=room), set())
        turn(servers, lambda: not any(servers[1].held()), set())
        assert [server.free() for server in servers] == before
        assert served(servers, {room + 9: ids})[room + 9]["right"]


@pytest.mark.slow
def test_windows_arrive_as_sglang_s_scheduler_lists_them(start: Callable[..., Any], room: int) -> None:
    """Its own pool of full and window layers, its mapping between them, and a tree that gives windows up."""
    with start(chunk=CHUNK, args=CACHED, pool="swa") as servers:
        before = [server.free() for server in servers]
        for i, tokens in enumerate((1, PAGE, CHUNK, CHUNK + 1, 3 * CHUNK + 7)):
            ids = prompt(tokens, 5000 + i)
            answer = served(servers, {room + i: ids})[room + i]
            assert answer["right"] and answer["tokens"] == [sum(ids) % 512]
        shared = prompt(5 * PAGE, 5100)
        for i, more in enumerate((3, PAGE + 4, 0)):
            ids = shared + prompt(more, 5101 + i)
            answer = served(servers, {room + 10 + i: ids})[room + 10 + i]
            assert answer["right"] and answer["tokens"] == [sum(ids) % 512], more
        prompts = {room + 20 + i: prompt(20 + 23 * i, 5200 + i) for i in range(4)}
        for one, answer in served(servers, prompts).items():
            assert answer["right"] and answer["tokens"] == [sum(prompts[one]) % 512]
        assert [server.free() for server in servers] == before
