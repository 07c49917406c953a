"""Modes that SGLang opens to back ends which say that they can: KV received in host memory, and roles that change at run time."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.sglang.conftest import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, PlayedRanks
from tests.sglang.test_transfers import begun, moved, sent


def received(
    prefill: PlayedRanks, decode: PlayedRanks, room: int, seed: int, there: list[int], chunks: list[list[int]]
) -> None:
    """Bring a request to where its KV is in the host pool of decode."""
    prefill.request(room=room), decode.request(room=room)
    assert all(decode.may_receive_in_host_memory(room=room))
    decode.want(room=room, ids=there, row=2, host=True)
    prefill.until(room, WAITING)
    prefill.begin(room=room, pages=len(there), row=1)
    sent(prefill, room, seed, chunks)
    decode.until(room, SUCCESS), prefill.until(room, SUCCESS)
    assert all(decode.matches_in_host_memory(seed=seed, ids=there))
    assert all(row == [100 + seed, room] for row in decode.row(index=2))
    prefill.clear(room=room), decode.clear(room=room)


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 1), (1, 2)])
def test_kv_is_received_in_host_memory(start: Callable[..., Any], room: int, prefills: int, decodes: int) -> None:
    with start(prefills, decodes, host=True) as (prefill, decode):
        moved(prefill, decode, room, 1, [[3, 9]], [7, 1])
        received(prefill, decode, room + 1, 2, [7, 1, 5], [[3], [9, 4]])
        assert all(decode.matches(seed=1, ids=[7, 1])), "the pages of the same numbers on the device are left alone"
        moved(prefill, decode, room + 2, 3, [[3, 9]], [7, 1])
        assert all(decode.matches_in_host_memory(seed=2, ids=[7, 1, 5]))


def test_host_memory_is_quiet_once_its_request_is_aborted(start: Callable[..., Any], room: int) -> None:
    with start(host=True) as (prefill, decode):
        prefill.request(room=room), decode.request(room=room)
        decode.want(room=room, ids=[7, 1], row=2, host=True)
        prefill.until(room, WAITING)
        prefill.begin(room=room, pages=2, row=1)
        prefill.run(seed=1, ids=[3])
        prefill.send(room=room, ids=[3])
        decode.until(room, TRANSFERRING)
        assert decode.quiet(room=room) == [False]
        decode.abort(room=room)
        decode.until(room, FAILED), prefill.until(room, FAILED)
        while not all(decode.quiet(room=room)):
            pass
        received(prefill, decode, room + 1, 2, [7, 1], [[3, 9]])


def test_without_a_host_pool_nothing_is_received_there(pair: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    prefill, decode = pair
    prefill.request(room=room), decode.request(room=room)
    assert decode.may_receive_in_host_memory(room=room) == [False]
    decode.want(room=room, ids=[7], row=2, host=True)
    decode.until(room, FAILED)
    assert "no host pool" in decode.why(room=room)[0]
    prefill.abort(room=room)


@pytest.mark.parametrize("ranks", [1, 2])
def test_servers_switch_their_roles_and_back(start: Callable[..., Any], room: int, ranks: int) -> None:
    with start(ranks, ranks, args={"enable_pd_role_switch": True}) as (one, other):
        moved(one, other, room, 1, [[3, 9]], [7, 1])
        for n in (1, 2):
            one, other = other, one
            one.switch(), other.switch()
            moved(one, other, room + n, 1 + n, [[3, 9], [4]], [7, 1, 5])
            assert all(one.manager_may_switch()) and all(other.manager_may_switch())


def test_a_server_that_switches_amid_a_request_ends_it_at_the_other(start: Callable[..., Any], room: int) -> None:
    """SGLang switches idle servers only; whoever comes between hears of it at once."""
    with start(args={"enable_pd_role_switch": True}) as (prefill, decode):
        begun(prefill, decode, room, [7, 1], 2)
        prefill.run(seed=1, ids=[3])
        prefill.send(room=room, ids=[3])
        decode.until(room, TRANSFERRING)
        prefill.switch()
        decode.until(room, FAILED)
        assert decode.why(room=room) != [""]


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_a_rank_of_plain_data_parallelism_takes_the_requests_that_are_its_own(
    start: Callable[..., Any], dp_rank: int
) -> None:
    """SGLang takes every such rank for number 0, and would refuse the requests of all others."""
    with start(dp_rank=dp_rank, args={"dp_size": 2}) as (prefill, _):
        prefill.request(room=2 + dp_rank)
        assert prefill.poll(room=2 + dp_rank) == [BOOTSTRAPPING]
