"""KV from one of SGLang's managers to another: its senders, receivers, bootstrap server and pools, in a process for each rank."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.sglang.conftest import FAILED, SUCCESS, TRANSFERRING, WAITING, PlayedRanks
from tests.sglang.played import PAGE


def begun(prefill: PlayedRanks, decode: PlayedRanks, room: int, there: list[int], count: int, prefix: int = 0) -> None:
    """Bring a request to where its prefill has room for it to be sent: row 1 on the one side, row 2 on the other."""
    prefill.request(room=room)
    decode.request(room=room)
    decode.want(room=room, ids=there, row=2, prefix=prefix)
    prefill.until(room, WAITING)
    assert set(prefill.begin(room=room, pages=count, row=1)) == {prefix}


def sent(prefill: PlayedRanks, room: int, seed: int, chunks: list[list[int]], first: int = 0) -> None:
    """Play the forward passes of a request and send their pages."""
    for i, ids in enumerate(chunks):
        prefill.run(seed=seed, ids=ids, first=first)
        if i == len(chunks) - 1:
            prefill.note(row=1, token=100 + seed, room=room)
        prefill.send(room=room, ids=ids)
        first += len(ids)


def delivered(
    prefill: PlayedRanks, decode: PlayedRanks, room: int, seed: int, there: list[int], first: int = 0
) -> None:
    decode.until(room, SUCCESS)
    prefill.until(room, SUCCESS)
    assert all(decode.matches(seed=seed, ids=there, first=first))
    assert all(row == [100 + seed, room] for row in decode.row(index=2))
    prefill.clear(room=room), decode.clear(room=room)


def moved(
    prefill: PlayedRanks, decode: PlayedRanks, room: int, seed: int, chunks: list[list[int]], there: list[int]
) -> None:
    begun(prefill, decode, room, there, sum(map(len, chunks)))
    sent(prefill, room, seed, chunks)
    delivered(prefill, decode, room, seed, there)


def test_chunks_arrive_whole(pair: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    moved(*pair, room, 2, [[3, 9], [4], [12, 11, 10]], [7, 1, 30, 2, 5, 6])


def test_what_decode_has_cached_is_left_alone(pair: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    prefill, decode = pair
    begun(prefill, decode, room, [8, 6], 2, prefix=3 * PAGE)
    sent(prefill, room, 3, [[20, 21]], first=3)
    delivered(prefill, decode, room, 3, [8, 6], first=3)


def test_decode_asks_for_pages_before_they_are_computed(pair: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    prefill, decode = pair
    begun(prefill, decode, room, [7, 1], 2)
    decode.until(room, TRANSFERRING)
    assert prefill.poll(room=room) == [WAITING] and decode.quiet(room=room) == [False]
    sent(prefill, room, 1, [[3], [9]])
    delivered(prefill, decode, room, 1, [7, 1])


def test_without_pages_the_metadata_arrive(pair: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    prefill, decode = pair
    begun(prefill, decode, room, [], 0, prefix=3 * PAGE)
    sent(prefill, room, 4, [[]])
    delivered(prefill, decode, room, 4, [])


def test_a_request_that_is_over_does_not_abort_the_next_one_in_its_room(
    pair: tuple[PlayedRanks, PlayedRanks], room: int
) -> None:
    prefill, decode = pair
    moved(prefill, decode, room, 5, [[3, 9]], [7, 1])
    begun(prefill, decode, room, [30, 31], 2)
    decode.abort_late(), prefill.abort_late()
    sent(prefill, room, 6, [[3], [9]])
    delivered(prefill, decode, room, 6, [30, 31])


def test_a_room_may_be_used_again_before_the_pages_of_the_former_request_are_free(
    pair: tuple[PlayedRanks, PlayedRanks], room: int
) -> None:
    prefill, decode = pair
    begun(prefill, decode, room, [7, 1], 2)
    decode.abort(room=room), decode.why(room=room)
    prefill.until(room, FAILED), prefill.why(room=room)
    begun(prefill, decode, room, [30, 31], 2)
    decode.release()
    sent(prefill, room, 8, [[3], [9]])
    delivered(prefill, decode, room, 8, [30, 31])


@pytest.mark.parametrize("number", [-1, 0, 1 << 63, 1 << 64, None, "7", 2.5])
def test_a_room_that_has_no_place_in_sglang_s_metadata_fails_its_request(
    pair: tuple[PlayedRanks, PlayedRanks], number: Any
) -> None:
    for engine in pair:
        engine.request(room=number)
        engine.until(number, FAILED)
        assert "bootstrap_room must be from 1" in engine.why(room=number)[0]


def test_kv_of_weights_that_the_other_server_no_longer_has_is_not_taken(
    pair: tuple[PlayedRanks, PlayedRanks], room: int
) -> None:
    """Weights are updated in place at one server after the other, while requests are under way."""
    prefill, decode = pair
    decode.weights(version="2")
    begun(prefill, decode, room, [7, 1], 2)
    sent(prefill, room, 1, [[3, 9]])
    decode.until(room, FAILED)
    assert "digest_differs" in decode.why(room=room)[0]
    prefill.abort(room=room), prefill.why(room=room)
    begun(prefill, decode, room + 1, [7, 1], 2)
    prefill.weights(version="2")  # nothing is computed yet
    sent(prefill, room + 1, 2, [[3], [9]])
    delivered(prefill, decode, room + 1, 2, [7, 1])


@pytest.mark.parametrize(
    ("updated", "reason"), [(0, "digest_differs"), (1, "weights of the decode server were updated")]
)
def test_what_one_server_s_weights_have_computed_the_other_one_does_not_take(
    pair: tuple[PlayedRanks, PlayedRanks], room: int, updated: int, reason: str
) -> None:
    """One server is updated after decode has asked, and before prefill computes."""
    prefill, decode = pair
    for engine in pair:
        engine.weights(version="old")
    begun(prefill, decode, room, [7, 1], 2)
    decode.until(room, TRANSFERRING)
    pair[updated].weights(version="new")
    sent(prefill, room, 1, [[3, 9]])
    decode.until(room, FAILED)
    assert reason in decode.why(room=room)[0]
    quiet(decode, room)
    if prefill.until(room, FAILED, SUCCESS) == [FAILED]:
        prefill.why(room=room)
    else:
        prefill.clear(room=room)
    pair[1 - updated].weights(version="new")
    moved(prefill, decode, room + 1, 2, [[3, 9]], [7, 1])


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_request_that_prefill_aborts_fails_at_decode(
    pair: tuple[PlayedRanks, PlayedRanks], room: int, chunks: int
) -> None:
    prefill, decode = pair
    begun(prefill, decode, room, [7, 1], 2)
    if chunks:
        prefill.run(seed=1, ids=[3])
        prefill.send(room=room, ids=[3])
    decode.until(room, TRANSFERRING)
    prefill.abort(room=room)
    prefill.why(room=room)
    decode.until(room, FAILED)
    assert "aborted" in decode.why(room=room)[0].lower()
    quiet(decode, room)


def test_decode_hears_at_once_of_a_request_that_prefill_has_aborted_before(
    pair: tuple[PlayedRanks, PlayedRanks], room: int
) -> None:
    prefill, decode = pair
    prefill.request(room=room), prefill.abort(room=room)
    decode.request(room=room), decode.want(room=room, ids=[7, 1], row=2)
    decode.until(room, FAILED)
    assert "it had failed before" in decode.why(room=room)[0]
    quiet(decode, room), prefill.why(room=room)


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_request_that_decode_aborts_fails_at_prefill(
    pair: tuple[PlayedRanks, PlayedRanks], room: int, chunks: int
) -> None:
    prefill, decode = pair
    begun(prefill, decode, room, [7, 1], 2)
    if chunks:
        prefill.run(seed=1, ids=[3])
        prefill.send(room=room, ids=[3])
    decode.until(room, TRANSFERRING)
    decode.abort(room=room)
    decode.until(room, FAILED)
    decode.why(room=room)
    quiet(decode, room)
    prefill.until(room, FAILED)
    prefill.why(room=room)
    prefill.run(seed=9, ids=[3])  # reused for something else
    moved(prefill, decode, room, 7, [[3, 9, 4]], [7, 1, 30])


def test_a_request_that_decode_lets_go_of_before_it_has_asked_fails_at_prefill(
    pair: tuple[PlayedRanks, PlayedRanks], room: int
) -> None:
    """SGLang does so with one for which decode never has room."""
    prefill, decode = pair
    prefill.request(room=room), decode.request(room=room)
    decode.clear(room=room)
    prefill.until(room, FAILED)
    assert "the decode server aborted it" in prefill.why(room=room)[0]


def quiet(decode: PlayedRanks, room: int) -> None:
    """Wait until the pages of a failed request may be used again."""
    import time

    end = time.monotonic() + 60
    while not all(decode.quiet(room=room)):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode", "latent"), [(2, 1, False), (1, 2, False), (2, 1, True), (1, 2, True)])
def test_ranks_may_differ(start: Callable[..., Any], room: int, prefill: int, decode: int, latent: bool) -> None:
    with start(prefill, decode, latent=latent) as pair:
        moved(*pair, room, 1, [[3, 9], [4]], [7, 1, 30])
        begun(*pair, room + 1, [7, 1], 2)
        pair[0].abort(room=room + 1)
        pair[1].until(room + 1, FAILED)
        pair[0].why(room=room + 1), pair[1].why(room=room + 1)
        moved(*pair, room + 2, 2, [[3, 9], [4]], [7, 1, 30])


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode", "latent"), [(2, 1, False), (1, 2, True)])
def test_prefill_may_have_pipeline_stages(
    start: Callable[..., Any], room: int, prefill: int, decode: int, latent: bool
) -> None:
    """Each stage sends its layers when it has computed them; the request is there once all have."""
    with start(prefill, decode, stages=2, latent=latent) as pair:
        servers, decoding = pair
        moved(*pair, room, 1, [[3, 9], [4]], [7, 1, 30])
        begun(*pair, room + 1, [7, 1, 30], 3)
        first, last = (PlayedRanks(servers.ranks[stage * prefill : (stage + 1) * prefill]) for stage in range(2))
        sent(first, room + 1, 2, [[3, 9]])
        first.run(seed=2, ids=[4], first=2)
        first.note(row=1, token=7, room=room + 1)  # the last stage knows
        first.send(room=room + 1, ids=[4])
        sent(last, room + 1, 2, [[3, 9]])
        assert set(decoding.until(room + 1, TRANSFERRING)) == {TRANSFERRING}
        last.run(seed=2, ids=[4], first=2)
        last.note(row=1, token=102, room=room + 1)
        last.send(room=room + 1, ids=[4])
        delivered(*pair, room + 1, 2, [7, 1, 30])
        begun(*pair, room + 2, [7, 1], 2)
        sent(first, room + 2, 3, [[3, 9]])
        last.abort(room=room + 2)
        decoding.until(room + 2, FAILED)
        first.until(room + 2, FAILED)  # decode tells them: of SGLang's stages, later ones tell no earlier one
        servers.why(room=room + 2), decoding.why(room=room + 2)
        quiet(decoding, room + 2)
        begun(*pair, room + 3, [], 0, prefix=3 * PAGE)
        sent(servers, room + 3, 4, [[]])
        delivered(*pair, room + 3, 4, [])
        moved(*pair, room + 4, 5, [[3, 9], [4]], [7, 1, 30])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "latent"), [(1, True), (2, False)])
def test_a_draft_model_s_cache_comes_along(start: Callable[..., Any], room: int, ranks: int, latent: bool) -> None:
    with start(ranks, ranks, draft=True, latent=latent) as pair:
        moved(*pair, room, 1, [[3, 9], [4]], [7, 1, 30])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "ranks", "here", "there"), [("mamba", (2, 2), [[5]], [[2]]), ("dsa", (2, 1), [[3, 9, 4]], [[7, 1, 8]])]
)
@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (2, 2)], ids=["one stage", "two stages", "two on both sides"])
def test_states_arrive(
    start: Callable[..., Any],
    room: int,
    pool: str,
    ranks: tuple[int, int],
    here: list[list[int]],
    there: list[list[int]],
    stages: tuple[int, int],
) -> None:
    """Of SGLang's own hybrid pools. A recurrent state is written until the end, an index with its pages; each stage has some layers'."""
    with start(*ranks, *stages, pool=pool) as (prefill, decode):
        for one, seed in ((room, 1), (room + 1, 2)):
            prefill.request(room=one), decode.request(room=one)
            decode.want(room=one, ids=[7, 1, 8], row=2, states=there)
            prefill.until(one, WAITING)
            prefill.begin(room=one, pages=3, row=1)
            prefill.run_states(seed=seed if pool == "dsa" else 9, ids=here)
            sent(prefill, one, seed, [[3], [9]])
            prefill.run(seed=seed, ids=[4], first=2), prefill.run_states(seed=seed, ids=here)
            prefill.note(row=1, token=100 + seed, room=one)
            assert set(decode.until(one, TRANSFERRING)) == {TRANSFERRING}
            prefill.send(room=one, ids=[4], states=here)
            decode.until(one, SUCCESS)
            assert all(decode.states_match(seed=seed, ids=there))
            delivered(prefill, decode, one, seed, [7, 1, 8])
