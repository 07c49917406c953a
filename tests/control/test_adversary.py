"""A fleet at one directory, and beside it a peer that has the key and takes all it can: processes of 1,024 descriptors each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.security import make_key
from kvxfer.testing.remote import Remote
from tests.control.fleet import Fleet, Hoarder, Prefill, limited

FLEET, PER_PROCESS = 600, 100
"""Engines of a fleet, and in each process."""

Process = Callable[..., Remote]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """Makes objects in processes of their own, of a class and with what it takes behind the settings that all have in common."""
    make_key(tmp_path / "key")
    config = Config(key_file=str(tmp_path / "key"), lease=120.0)
    with ExitStack() as stack:

        def make(kind: type, *args: Any) -> Remote:
            made = Remote(kind.__name__, limited, kind, config, *args)
            stack.callback(made.close)
            return made

        yield make


def test_600_engines_wait_at_one_directory_from_one_address_with_1024_descriptors(process: Process) -> None:
    prefill = process(Prefill)
    fleet = [process(Fleet, PER_PROCESS) for _ in range(FLEET // PER_PROCESS)]
    source = prefill("source")
    for each in fleet:
        each.wait()
    for each in fleet:
        each("ask", source)
    assert prefill("asked", FLEET, 60.0) == FLEET
    prefill("begin")
    for each in fleet:
        each.send("heard", source, 60.0)
    assert [each.get() for each in fleet] == [(PER_PROCESS, 0)] * len(fleet), "nobody is cut off and has to ask again"


def test_newcomers_are_told_while_one_peer_holds_all_connections_that_it_can_get(process: Process) -> None:
    """It keeps 1,100 of them, which is more than the process has descriptors."""
    prefill, hoarder, fleet = process(Prefill), process(Hoarder), process(Fleet, 50)
    source = prefill("source")
    assert hoarder("hoard", source, 1100) >= 1000
    fleet("ask", source)
    assert prefill("asked", 50, 20.0) >= 50
    prefill("begin")
    assert fleet("heard", source, 20.0) == (50, 0)
