"""What of the connector needs no SGLang: settings, pools, notes, metadata, digests."""

import ctypes
import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer import Cache, Config, ConfigError, KvxferError, PeerError, Rank
from kvxfer.geometry import route
from kvxfer_sglang import notes
from kvxfer_sglang.cache import heads_of, pool_cache
from kvxfer_sglang.identity import request_digest
from kvxfer_sglang.metadata import row_of, set_row
from kvxfer_sglang.rank import EngineRank
from kvxfer_sglang.settings import settings
from kvxfer_sglang.states import States
from kvxfer_sglang.support import UnsupportedSetupError, check_adapters

PAGE, PAGES, LAYERS, UNIT = 16, 8, 3, 32


def test_settings_are_sglangs_where_nothing_is_said() -> None:
    config = settings("10.0.0.7", 300.0, {})
    assert (config.listen, config.transfer_timeout, config.start) == ("10.0.0.7", 300.0, 300.0)


def test_settings_come_as_json_or_from_a_file(tmp_path: Path) -> None:
    told = {"backend": "tcp", "listen": "127.0.0.1", "transfer_timeout": 5}
    (tmp_path / "kvxfer.json").write_text(json.dumps(told))
    for text in (json.dumps(told), str(tmp_path / "kvxfer.json")):
        config = settings("10.0.0.7", 300.0, {"KVXFER_SGLANG": text})
        assert (config.backend, config.listen, config.transfer_timeout) == ("tcp", "127.0.0.1", 5)
        assert config.start == 300.0  # a request may queue at prefill for longer than a transfer may take


def test_who_advertises_an_address_listens_where_kvxfer_does() -> None:
    assert (
        settings("10.0.0.7", 300.0, {"KVXFER_SGLANG": '{"advertise": "10.0.0.7", "listen": "0.0.0.0"}'}).listen
        == "0.0.0.0"
    )


@pytest.mark.parametrize("text", ["[1]", "{", "/nowhere/kvxfer.json", '{"lisen": "x"}'])
def test_wrong_settings_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        settings("10.0.0.7", 300.0, {"KVXFER_SGLANG": text})


@pytest.mark.parametrize(
    ("ranks", "total", "starts"), [(1, 8, [0]), (4, 8, [0, 2, 4, 6]), (8, 8, [*range(8)]), (8, 2, [0] * 4 + [1] * 4)]
)
def test_heads_of_ranks(ranks: int, total: int, starts: list[int]) -> None:
    found = [heads_of(rank, ranks, total) for rank in range(ranks)]
    assert [first for first, _, _ in found] == starts
    assert {count for _, count, _ in found} == {max(1, total // ranks)}


def buffers(heads: int, planes: int = 2, **changed: Any) -> SimpleNamespace:
    """What SGLang tells of a pool, whose memory nobody touches."""
    count, page = planes * LAYERS, PAGE * heads * UNIT
    told = {
        "kv_data_ptrs": [(i + 1) << 32 for i in range(count)],
        "kv_data_lens": [PAGES * page] * count,
        "kv_item_lens": [page] * count,
        "kv_layer_ids": [],
        "num_draft_entries": 0,
        "kv_cache_dtype_str": "bfloat16",
        "page_size": PAGE,
        "state_types": [],
        "state_data_ptrs": [],
        "state_data_lens": [],
        "state_item_lens": [],
        "state_layer_ids": [],
        "state_dim_per_tensor": [],
        "state_slice_outer_counts": [],
        "state_conv_shard_groups": [],
    }
    return SimpleNamespace(**{**told, **changed})


@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (2, 1), (1, 2), (4, 2), (8, 4), (2, 8)])
def test_every_head_of_every_layer_is_read_once(producers: int, consumers: int) -> None:
    def engine(ranks: int, total: int = 4) -> list[Any]:
        own = [heads_of(rank, ranks, total) for rank in range(ranks)]
        return [pool_cache(buffers(heads[1]), heads, Rank(tp=rank), ranks, "cpu") for rank, heads in enumerate(own)]

    found = route(engine(producers), engine(consumers))
    for rank in found.values():
        cells = [
            (a.dst_view, layer, head)
            for assignments in rank.assignments.values()
            for a in assignments
            for layer in a.layers
            for head in range(a.head_lo, a.head_hi)
        ]
        assert len(cells) == len(set(cells)) == 2 * LAYERS * max(1, 4 // consumers)


def test_a_draft_model_moves_between_equal_numbers_of_ranks() -> None:
    def engine(ranks: int) -> list[Any]:
        own = [heads_of(rank, ranks, 4) for rank in range(ranks)]
        drafts = {"num_draft_entries": 2}  # the last two of the buffers
        return [pool_cache(buffers(h[1], 4, **drafts), h, Rank(tp=r), ranks, "cpu") for r, h in enumerate(own)]

    [producers, consumers] = engine(2), engine(2)
    for rank, found in route(producers, consumers).items():
        planes = {(p.tp, producers[p.tp].views[a.src_view].plane) for p, of in found.assignments.items() for a in of}
        assert planes == {(rank.tp, plane) for plane in ("k", "v", "draft")}
    with pytest.raises(KvxferError, match="draft"):
        route(engine(2), engine(1))


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_data_ptrs": [], "kv_data_lens": [], "kv_item_lens": []},
        {"kv_item_lens": [PAGE * UNIT] * 5 + [2 * PAGE * UNIT]},
        {"kv_item_lens": [PAGE * UNIT + 1] * 6},
    ],
    ids=["nothing", "uneven", "odd"],
)
def test_pools_that_lie_otherwise_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSetupError):
        pool_cache(buffers(1, **changed), (0, 1, 1), Rank(), 1, "cpu")


@pytest.mark.parametrize("more", [{"enable_lora": True}, {"enable_lora": None, "lora_paths": ["a=/somewhere"]}])
def test_servers_with_adapters_are_refused(more: dict[str, Any]) -> None:
    """Two servers may have two adapters of one name, and no request's adapter is handed over."""
    check_adapters(SimpleNamespace(enable_lora=None, lora_paths=None))
    with pytest.raises(UnsupportedSetupError, match="--enable-lora"):
        check_adapters(SimpleNamespace(**more))


def test_metadata_are_copied_row_by_row() -> None:
    def rows(fill: int) -> tuple[SimpleNamespace, list[Any]]:
        memory = [(ctypes.c_uint8 * (4 * size))(*[fill + size] * (4 * size)) for size in (64, 8)]
        return SimpleNamespace(aux_data_ptrs=[ctypes.addressof(m) for m in memory], aux_item_lens=[64, 8]), memory

    ours, _ = rows(1)
    theirs, memory = rows(100)
    set_row(theirs, 2, row_of(ours, 1))
    assert bytes(memory[0]) == bytes([164] * 128 + [65] * 64 + [164] * 64)
    assert bytes(memory[1]) == bytes([108] * 16 + [9] * 8 + [108] * 8)
    with pytest.raises(PeerError, match="71 bytes of metadata"):
        set_row(theirs, 2, bytes(71))
    assert bytes(memory[1]) == bytes([108] * 16 + [9] * 8 + [108] * 8)


NOTES = [
    notes.PagesWanted(1 << 62, 7, "::1", 4000, 32, 2),
    notes.PagesOffered(3, 7, "kvxfer1.abc", b""),
    notes.AttemptFailed(3, 7, "gone"),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_notes_arrive_as_they_are(note: Any) -> None:
    assert notes.unpacked(notes.packed(note)) == note


@pytest.mark.parametrize(
    "frames", [[], [b"x"], [b"KVXFER", b""], [b"KVXFER", b"\xc1"], [b"x", b"\x80"], [b"KVXFER"] * 3]
)
def test_what_is_no_note_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(PeerError):
        notes.unpacked(frames)


def test_requests_have_digests_of_their_own() -> None:
    told = itertools.product((1, 2), (0, 16), (1, 2), ("default", "2"))
    assert len({request_digest(*one) for one in told}) == 16


@pytest.mark.parametrize(
    ("kinds", "indices", "rows"),
    [
        ((), [], [[3, 9, 4]]),
        (("swa",), [[6, 8]], [[3, 9, 4], [-1, 6, 8]]),
        (("swa",), [[]], [[3, 9, 4], [-1, -1, -1]]),
        (("mamba", "dsa"), [[5], [3, 9, 4]], [[3, 9, 4], [5]]),
        (("swa",), None, [[3, 9, 4], []]),
    ],
)
def test_rows_of_a_block_table(kinds: tuple[str, ...], indices: Any, rows: list[list[int]]) -> None:
    states = States(kinds, PAGE)
    assert states.rows([3, 9, 4], indices) == rows and len(states.groups) == len(rows)


@pytest.mark.parametrize(
    ("kinds", "indices"),
    [
        (("swa",), []),
        (("swa",), [[1, 2, 5, 6]]),
        (("mamba",), [[]]),
        (("mamba",), [[1, 2]]),
        (("dsa",), [[3, 9, 5]]),
        ((), [[1]]),
    ],
)
def test_what_sglang_does_not_list_is_refused(kinds: tuple[str, ...], indices: Any) -> None:
    with pytest.raises(KvxferError, match="SGLang has listed"):
        States(kinds, PAGE).rows([3, 9, 4], indices)


def test_recurrent_states_move_between_equal_numbers_of_ranks() -> None:
    def engine(ranks: int) -> list[Any]:
        own = [heads_of(rank, ranks, 4) for rank in range(ranks)]
        sizes = [96, 96, 512, 512]  # two tensors of two layers
        states = {
            "state_types": ["mamba"],
            "state_data_ptrs": [[(i + 40) << 32 for i in range(4)]],
            "state_data_lens": [[8 * size for size in sizes]],
            "state_item_lens": [sizes],
            "state_layer_ids": [[5, 7, 5, 7]],
            "state_dim_per_tensor": [[16 // ranks] * 2 + [4 // ranks] * 2],
            "state_slice_outer_counts": [[1] * 4],
            "state_conv_shard_groups": [[None] * 4],  # as of Mamba 2
        }
        return [pool_cache(buffers(h[1], **states), h, Rank(tp=r), ranks, "cpu") for r, h in enumerate(own)]

    [producers, consumers] = engine(2), engine(2)
    views = {view.plane: view for view in producers[0].views}
    assert views["state.0"].layers == views["state.1"].layers == ("5", "7") and views["state.1"].unit == 512
    for rank, found in route(producers, consumers).items():
        assert {p.tp for p, of in found.assignments.items() for a in of if a.dst_view > 1} == {rank.tp}
    with pytest.raises(KvxferError, match="state.0"):
        route(engine(2), engine(1))


def pool_with_index(layers: int, first: int = 0, rank: int = 0) -> Any:
    """What is known of a pipeline stage whose layers have latents and an index."""
    page, item = PAGE * UNIT, 640
    told = {
        "kv_data_ptrs": [(i + 1) << 32 for i in range(layers)],
        "kv_data_lens": [PAGES * page] * layers,
        "kv_item_lens": [page] * layers,
        "prefill_start_layer": first,
        "state_types": ["dsa"],
        "state_data_ptrs": [[(i + 40) << 32 for i in range(layers)]],
        "state_data_lens": [[PAGES * item] * layers],
        "state_item_lens": [[item] * layers],
    }
    return pool_cache(buffers(1, planes=1, **told), None, Rank(pp=rank), 1, "cpu")


def test_each_stage_gives_the_index_of_its_own_layers() -> None:
    stages = [pool_with_index(2), pool_with_index(3, first=2, rank=1)]
    (found,) = route(stages, [pool_with_index(5)]).values()
    for plane in (0, 1):  # latents, and the index
        read = {
            p.pp: [layer for a in of if a.dst_view == plane for layer in a.layers]
            for p, of in found.assignments.items()
        }
        assert read == {0: ["0", "1"], 1: ["2", "3", "4"]}


def test_a_stage_may_have_no_recurrent_layer() -> None:
    names = ["state_types", "state_data_ptrs", "state_data_lens", "state_item_lens", "state_layer_ids"]
    more = ["state_dim_per_tensor", "state_slice_outer_counts", "state_conv_shard_groups"]
    nothing: dict[str, Any] = {name: [[]] for name in names + more} | {"state_types": ["mamba"]}
    cache = pool_cache(buffers(1, **nothing), (0, 1, 1), Rank(), 1, "cpu")
    assert [view.plane for view in cache.views] == ["k", "v"] and [group.kind for group in cache.groups] == [
        "full",
        "state",
    ]


def test_a_rank_that_cannot_start_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    def gather(own: Any) -> list[Any]:
        assert set(threading.enumerate()) > before
        raise RuntimeError("another rank has died")

    memory = np.zeros((LAYERS, PAGES, PAGE, UNIT), np.uint8)
    cache = Cache.of_tensors(memory, "layer block token unit", encoding="e")
    config = Config(backend="kvxfer.testing.fake:FakeTransport")
    with pytest.raises(RuntimeError, match="another rank"):
        EngineRank(cache, config, "e", {"model": "m"}, gather, lambda event: None)
    assert not {t for t in threading.enumerate() if t.is_alive()} - before
