"""What does not go well: fences that are late, servers that differ or die, and set-ups that are refused at start."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.sglang.conftest import FAILED, SUCCESS, TRANSFERRING, PlayedRanks
from tests.sglang.test_transfers import begun, delivered, moved, quiet, sent


def test_pages_wait_for_their_event(pair: tuple[PlayedRanks, PlayedRanks], room: int) -> None:
    prefill, decode = pair
    begun(prefill, decode, room, [7, 1], 2)
    prefill.send(room=room, ids=[3], held=True)  # not computed yet
    prefill.note(row=1, token=101, room=room)
    prefill.run(seed=1, ids=[9], first=1)
    prefill.send(room=room, ids=[9])
    decode.until(room, TRANSFERRING)
    time.sleep(0.3)
    assert decode.poll(room=room) == [TRANSFERRING]
    prefill.run(seed=1, ids=[3])
    prefill.finish()
    delivered(prefill, decode, room, 1, [7, 1])


@pytest.mark.slow
def test_a_request_may_queue_at_prefill_for_longer_than_a_transfer_may_take(
    start: Callable[..., Any], room: int
) -> None:
    """Longer also than prefill keeps a question by its own settings: decode then asks again."""
    hasty = {"transfer_timeout": 1.0, "peer_timeout": 1.0, "lease": 1.0}
    with start(settings={"prefill": {**hasty, "start_timeout": 0.5}, "decode": hasty}) as (prefill, decode):
        begun(prefill, decode, room, [7, 1], 2)
        decode.until(room, TRANSFERRING)
        time.sleep(5.0)
        sent(prefill, room, 1, [[3], [9]])
        delivered(prefill, decode, room, 1, [7, 1])


@pytest.mark.slow
def test_a_request_that_queues_at_prefill_for_too_long_fails_on_both_sides(
    start: Callable[..., Any], room: int
) -> None:
    with start(settings={"decode": {"start_timeout": 1.0}}) as (prefill, decode):
        begun(prefill, decode, room, [7, 1], 2)
        decode.until(room, FAILED)
        assert "raise 'start_timeout' if requests queue there" in decode.why(room=room)[0]
        prefill.until(room, FAILED)
        prefill.why(room=room), quiet(decode, room)


@pytest.mark.slow
def test_servers_of_different_models_say_so(start: Callable[..., Any], room: int) -> None:
    with start(settings={"decode": {"model": "another"}}) as (prefill, decode):
        begun(prefill, decode, room, [7, 1], 2)
        sent(prefill, room, 1, [[3, 9]])
        decode.until(room, FAILED)
        assert "the models differ: model: another here" in decode.why(room=room)[0]


@pytest.mark.slow
def test_a_prefill_server_that_dies_fails_its_requests(start: Callable[..., Any], room: int) -> None:
    environ = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2", "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1"}
    with start(environ=environ, settings={"decode": {"peer_timeout": 2}}) as (prefill, decode):
        begun(prefill, decode, room, [7, 1], 2)
        begun(prefill, decode, room + 1, [8, 2], 2)
        prefill.run(seed=1, ids=[3])
        prefill.send(room=room, ids=[3])
        decode.until(room, TRANSFERRING), decode.until(room + 1, TRANSFERRING)
        prefill.ranks[0].kill()
        for one in (room, room + 1):
            decode.until(one, FAILED)
            assert decode.why(room=one) != [""]
            quiet(decode, one)


@pytest.mark.slow
def test_a_decode_server_that_dies_costs_pages_for_a_lease(start: Callable[..., Any], room: int) -> None:
    with start(settings={"prefill": {"peer_timeout": 2, "lease": 3}}) as (prefill, decode):
        moved(prefill, decode, room, 1, [[3, 9]], [7, 1])
        begun(prefill, decode, room + 1, [7, 1], 2)
        prefill.run(seed=1, ids=[3])
        prefill.send(room=room + 1, ids=[3])
        decode.until(room + 1, TRANSFERRING)
        decode.ranks[0].kill()
        prefill.run(seed=1, ids=[9], first=1)
        prefill.send(room=room + 1, ids=[9])
        assert prefill.until(room + 1, FAILED, SUCCESS) == [FAILED]
        assert prefill.why(room=room + 1) != [""]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("states of this kind (qsa_pending)", {"args": {"state_types": ["mamba", "qsa_pending"]}}),
    ("states of this kind (swa, swa)", {"args": {"state_types": ["swa", "swa"], "swa_kv_cache_layout": "nhd"}}),
    (
        "--pp-size 2 together with a sliding-window pool",
        {
            "args": {"state_types": ["swa", "mamba"], "swa_kv_cache_layout": "nhd"},
            "settings": {"parallel": {"pp_size": 2}},
        },
    ),
    ("token by token, head by head (hnd)", {"args": {"state_types": ["swa"], "swa_kv_cache_layout": "hnd"}}),
    ("hybrid or compressed latent pools", {"args": {"is_hybrid_mla_backend": True}}),
    ("hybrid or compressed latent pools", {"args": {"kv_layout": "fp8_paged"}}),
    (
        "draft model's cache (--speculative-algorithm) together with",
        {"args": {"num_draft_entries": 2}, "settings": {"parallel": {"pp_size": 2}}},
    ),
    ("--kv-cache-dtype fp4_e2m1", {"args": {"kv_cache_dtype_str": "fp4_e2m1"}}),
    ("70000 bytes of metadata", {"args": {"aux_item_lens": [70_000]}}),
    ("--attn-cp-size 2", {"settings": {"parallel": {"attn_cp_size": 2}}}),
    ("--dcp-size 2", {"settings": {"parallel": {"attn_dcp_size": 2}}}),
    ("--enable-kv-cache-sharding", {"settings": {"parallel": {"enable_kv_cache_sharding": True}}}),
    ("--enable-dsa-cache-layer-split", {"settings": {"parallel": {"enable_dsa_cache_layer_split": True}}}),
    ("--enable-hisparse", {"settings": {"memory": {"enable_hisparse": True}}}),
    ("--enable-memory-saver", {"settings": {"exec": {"features": {"enable_memory_saver": True}}}}),
    ("prefill_complete", {"settings": {"disagg": {"disaggregation_decode_allocation_policy": "prefill_complete"}}}),
    ("(npu)", {"settings": {"device": {"device": "npu"}}}),
    ("SGLANG_DISAGG_STAGING_BUFFER", {"environ": {"SGLANG_DISAGG_STAGING_BUFFER": "1"}}),
    ("INTRA_NODE_NVLINK", {"environ": {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK"}}),
]


@pytest.mark.parametrize(("words", "change"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    pair: tuple[PlayedRanks, PlayedRanks], words: str, change: dict[str, Any]
) -> None:
    nothing: dict[str, Any] = {"args": {}, "settings": {}, "environ": {}}
    for engine in pair:
        assert engine.refusal(**nothing) == [""]
        assert words in engine.refusal(**{**nothing, **change})[0]


def test_pages_must_not_be_reused_while_they_are_written_to(pair: tuple[PlayedRanks, PlayedRanks]) -> None:
    change = {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "0"}
    prefill, decode = (engine.refusal(args={}, settings={}, environ=change)[0] for engine in pair)
    assert not prefill and "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0" in decode


@pytest.mark.slow
def test_a_server_that_is_refused_does_not_start(start: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="kvxfer does not support --enable-memory-saver"):
        with start(args={"enable_memory_saver": True}):
            pass
