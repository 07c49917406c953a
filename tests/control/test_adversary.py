"""Greedy peers that have the key, and fleets, by real processes: the short form of `kvxfer bench adversary`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.security import make_key
from kvxfer.testing.remote import Remote
from kvxfer_bench.adversary import measure_adversary, measure_fleet
from kvxfer_bench.honest import BAIT, Fleet, Prefill, limited
from kvxfer_bench.hostile import Hostile

SHORT = [
    "1,100 idle connections at the directory",
    "100 connections from another address, each made again after its handshake",
    "40 links that take no piece, each under its own name",
    "the same for five seconds, then beside consumers that come new",
    "a directory of 3,000 ranks",
    "another producer that is cut off during a load",
]
LOADS = 5


@pytest.mark.parametrize("case", SHORT)
def test_loads_beside_a_greedy_peer_take_at_most_twice_their_time_alone(case: str) -> None:
    found = measure_adversary("tcp", True, LOADS, 0, [case])
    assert found["wrong"] == []
    assert set(found["cases"][case]["outcomes"]) == {"delivered"}


def test_without_a_key_and_staged_by_sending() -> None:
    case = "40 links that take no piece"
    assert measure_adversary("zmq", False, LOADS, 0, [case])["wrong"] == []


def test_600_engines_wait_at_one_directory_from_one_address_with_1024_descriptors(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    config = Config(key_file=str(tmp_path / "key"), lease=120.0)
    fleet = measure_fleet(config, 600)
    assert (fleet["asked"], fleet["told"]) == (600, 600), fleet
    assert fleet["cut_off"] == 0, "nobody has to ask again"


def test_newcomers_are_told_while_one_peer_holds_all_connections_that_it_can_get(tmp_path: Path) -> None:
    """It has the key and keeps 1,100 of them, which is more than the process has descriptors."""
    make_key(tmp_path / "key")
    config = Config(key_file=str(tmp_path / "key"), lease=120.0)
    prefill = Remote("prefill engine", limited, Prefill, config)
    hostile, fleet = Remote("hostile peer", Hostile, config), Remote("fleet", limited, Fleet, config, 50)
    try:
        source = prefill("source")
        assert hostile("idle", source, 1100) >= 1000
        fleet("ask", source, BAIT)
        assert prefill("asked", BAIT, 50, 20.0) >= 50
        prefill("begin", BAIT)
        assert fleet("heard", source, BAIT, 20.0) == (50, 0)
    finally:
        for each in (fleet, hostile, prefill):
            each.close()
