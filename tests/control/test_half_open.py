"""A connection whose packets get lost without a word, as when a firewall has forgotten it, while new ones can be made."""

from __future__ import annotations

import subprocess
from functools import partial

import pytest

from tests.conftest import require
from tests.networks import hosts, program

directory = partial(program, "tests.control.half_open")


@pytest.mark.timeout(180)
def test_notices_find_another_way_within_the_time_of_a_silent_peer() -> None:
    """Left to itself, TCP tries for a quarter of an hour. Until then no lease is renewed, and no offer declined."""
    require("networks")
    with hosts(2) as (here, there), directory(there, "hears", there.address) as hears:
        with directory(here, "tells", here.address) as tells:
            tells.tell(*hears.hear()["source"])
            hears.tell()
            assert hears.hear()["heard"]
            tells.tell()
            (port,) = tells.hear()["ports"]
            lose = f"ip rule add pref 1 sport {port} ipproto tcp blackhole"
            subprocess.run([*here.into, *lose.split()], check=True, timeout=30.0)
            hears.tell()
            assert hears.hear()["heard"]
            tells.tell()
            assert set(tells.hear()["ports"]) - {port}, "by another connection"
