"""Honest loads beside greedy peers that have the key, and a fleet at one directory: real processes of 1,024 descriptors each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.identity import TransferId
from kvxfer.security import make_key
from kvxfer.testing.remote import Remote
from tests.control.honest import BAIT, Fleet, HonestEngine, Prefill, limited
from tests.control.hostile import Hostile

SETTLE_S = 5.0
"""Seconds after which it is known of each link under a name of its own that it takes nothing."""
FLEET, PER_PROCESS = 600, 100
"""Engines of a fleet, and in each process."""

Process = Callable[..., Remote]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """Makes objects in processes of their own, of a class and with what it takes before the settings that all have in common."""
    make_key(tmp_path / "key")
    config = Config(
        backend="tcp", staging_bytes=1 << 18, transfer_timeout=60.0, lease=120.0, peer_timeout=15.0,
        key_file=str(tmp_path / "key"),
    )  # fmt: skip
    with ExitStack() as stack:

        def make(kind: type, *args: Any) -> Remote:
            made = Remote(kind.__name__, limited, kind, config, *args)
            stack.callback(made.close)
            return made

        yield make


def reconnect(hostile: Remote, p: Remote) -> None:
    hostile("reconnect", p("source"), 100, "127.0.0.2")
    time.sleep(SETTLE_S)


def stall(hostile: Remote, p: Remote) -> None:
    p("offer", BAIT, 1000)
    hostile("stall", p("source"), BAIT, 40, 40)


def stall_for_a_while(hostile: Remote, p: Remote) -> None:
    stall(hostile, p)
    time.sleep(SETTLE_S)


ATTACKS: dict[str, tuple[Callable[[Remote, Remote], Any], bool]] = {
    "1,100 idle connections at the directory": (lambda hostile, p: hostile("idle", p("source"), 1100), True),
    "100 connections from another address, each made again after its handshake": (reconnect, True),
    "40 links that take no piece, each under its own name": (stall, False),
    "the same for five seconds": (stall_for_a_while, True),
}
"""The attacks on a producer, and whether a new consumer makes each load beside them."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_loads_beside_a_greedy_peer_are_delivered(process: Process, attack: str) -> None:
    begin, newcomers = ATTACKS[attack]
    p, d, hostile = process(HonestEngine), process(HonestEngine), process(Hostile)

    def load(number: int, d: Remote) -> str:
        p("offer", transfer := TransferId("own/1/load", number))
        return d("load", p("source"), transfer, 60.0)  # type: ignore[no-any-return]

    assert load(0, d) == "delivered"
    begin(hostile, p)
    for number in range(1, 4):
        assert load(number, process(HonestEngine) if newcomers else d) == "delivered"


def test_600_engines_wait_at_one_directory_from_one_address_with_1024_descriptors(process: Process) -> None:
    prefill = process(Prefill)
    fleet = [process(Fleet, PER_PROCESS) for _ in range(FLEET // PER_PROCESS)]
    source = prefill("source")
    for each in fleet:
        each.wait()
    for each in fleet:
        each("ask", source, BAIT)
    assert prefill("asked", BAIT, FLEET, 60.0) == FLEET
    prefill("begin", BAIT)
    for each in fleet:
        each.send("heard", source, BAIT, 60.0)
    assert [each.get() for each in fleet] == [(PER_PROCESS, 0)] * len(fleet), "nobody is cut off and has to ask again"


def test_newcomers_are_told_while_one_peer_holds_all_connections_that_it_can_get(process: Process) -> None:
    """It keeps 1,100 of them, which is more than the process has descriptors."""
    prefill, hostile, fleet = process(Prefill), process(Hostile), process(Fleet, 50)
    source = prefill("source")
    assert hostile("idle", source, 1100) >= 1000
    fleet("ask", source, BAIT)
    assert prefill("asked", BAIT, 50, 20.0) >= 50
    prefill("begin", BAIT)
    assert fleet("heard", source, BAIT, 20.0) == (50, 0)
