"""Greedy peers that have the key, and fleets, by real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.security import make_key
from kvxfer.testing.remote import Remote
from tests.control.adversary import CASES, loads_beside, measure_attack, measure_fleet
from tests.control.honest import BAIT, Fleet, Prefill, limited
from tests.control.hostile import Hostile

LONG = {
    "600 half handshakes at the directory",
    "40 links that take no piece",
    "a directory of 200 ranks that do not answer",
    "notices without end, over 40 connections",
    "questions whose answers are not read, over 100 connections",
}
LOADS = 5


@pytest.mark.keep(6)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in LONG else ()) for case in CASES])
def test_loads_beside_a_greedy_peer_are_delivered(case: str, tmp_path: Path) -> None:
    assert loads_beside(case, 2, tmp_path) == {"delivered"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loads_beside_a_greedy_peer_take_at_most_twice_their_time_alone(case: str) -> None:
    found = measure_attack(case, "tcp", True, LOADS)
    assert not found["slow"], found


@pytest.mark.slow
def test_without_a_key_and_staged_by_sending() -> None:
    found = measure_attack("40 links that take no piece", "zmq", False, LOADS)
    assert set(found["outcomes"]) == {"delivered"} and not found["slow"], found


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
