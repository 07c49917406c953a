"""How links use a back end by where the cache lies: the rules of devices, held without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.data.policy import ALWAYS, DEVICE_RUN, LinkPolicy, default_staging, stager
from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache, Group, Heads, Planner, Rank, Region, View, route
from kvxfer.protocol.parts import piece_bytes
from kvxfer.protocol.values import LinkInfo
from kvxfer.transport import Capabilities, Verb

LAYERS, HEADS, TOKENS, UNIT, BLOCKS = 32, 8, 16, 512, 600
READ, WRITE, BOTH = frozenset({Verb.READ}), frozenset({Verb.WRITE}), frozenset({Verb.SEND, Verb.RECV})
MEMORY = frozenset({"cpu", "cuda"})


def cache(device: str) -> Cache:
    """Blocks outermost, as vLLM is asked for on CUDA: all layers of a block are one run of 2 MiB."""
    page = HEADS * TOKENS * UNIT
    names, offsets = zip(*((f"layer.{i}", i * page) for i in range(LAYERS)), strict=True)
    view = View("kv", 0, names, offsets, BLOCKS, LAYERS * page, UNIT, "x", Heads(0, HEADS, HEADS, TOKENS * UNIT), UNIT)
    return Cache((Region(1 << 32, BLOCKS * LAYERS * page, device),), (Group(TOKENS),), (view,))


def policy(device: str, can: Capabilities) -> LinkPolicy:
    staging: Any = SimpleNamespace(piece_bytes=64 << 20)
    return LinkPolicy.of("x", can, staging, cache(device))


@pytest.mark.parametrize(
    ("device", "can", "mode", "below"),
    [
        ("cpu", Capabilities(READ, MEMORY), "read", 16384),
        ("cuda:0", Capabilities(READ, MEMORY), "read", DEVICE_RUN),
        ("cuda:0", Capabilities(READ, MEMORY, run_bytes=8 << 20), "read", 8 << 20),
        ("cuda:0", Capabilities(READ, frozenset({"cpu"})), "read", ALWAYS),
        ("cuda:0", Capabilities(READ, MEMORY, gathers=False), "read", ALWAYS),
        ("cuda:0", Capabilities(READ, MEMORY, factored=True), "read", 0),
        ("cuda:0", Capabilities(WRITE, MEMORY, quiet="later"), "write", ALWAYS),
        ("cuda:0", Capabilities(BOTH, MEMORY), "sendrecv", DEVICE_RUN),
    ],
)
def test_when_parts_are_packed_as_a_first_guess(device: str, can: Capabilities, mode: str, below: int) -> None:
    found = policy(device, can)
    assert (found.mode, found.stage_below) == (mode, below)


def test_a_device_stages_in_longer_pieces_and_only_in_memory_that_can_be_moved() -> None:
    assert default_staging("cuda:0") == 8 * default_staging("cpu")
    with pytest.raises(ConfigError, match=r"moves \['xpu'\] memory, the cache is in \['cuda'\]"):
        stager(cache("cuda:0"), 1 << 20)(Capabilities(READ, frozenset({"xpu"})))


@pytest.mark.parametrize("tokens", [16, 1023, 8191, 8177])
def test_a_load_of_all_but_one_token_goes_straight_on_a_device(tokens: int) -> None:
    """As one of whole blocks does: its last block is one run, not one for each head of each layer."""
    sides = cache("cuda:0"), cache("cuda:0")
    planner = Planner(*sides, route(sides[:1], sides[1:])[Rank()].assignments[Rank()])
    table = [np.random.default_rng(1).permutation(BLOCKS)[: -(-tokens // TOKENS)]]
    below = policy("cuda:0", Capabilities(READ, MEMORY)).stage_below
    info = LinkInfo("read", planner, piece_bytes=64 << 20, stage_below=below)
    made = planner.plan(table, table, 0, tokens, info.moves_tail(True))
    assert made.rows == len(table[0]) and piece_bytes(made, info) == 0
    sent = LinkInfo("sendrecv", planner, piece_bytes=64 << 20, stage_below=below)
    part = planner.plan(table, table, 0, tokens, sent.moves_tail(True))
    assert part.nbytes == tokens * LAYERS * HEADS * UNIT, "what nobody asked for is not sent"
