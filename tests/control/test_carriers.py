"""Who stands between two engines of a host and is the peer of both: engines in networks of their own, by real processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from kvxfer.security import make_key
from tests.conftest import require
from tests.networks import hosts, program

require("cma")

begun = partial(program, "tests.control.carrier")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("keyed, elsewhere", [(True, True), (True, False), (False, True)])
def test_who_stands_between_two_engines_does_not_make_them_peers(keyed: bool, elsewhere: bool, tmp_path: Path) -> None:
    """Each has its control connection with the carrier, which may not have one copy from the other's memory for it."""
    require("networks")
    make_key(tmp_path / "key")
    with hosts(2) as both:
        here, there = both
        peers = [host.address for host in both]
        settings = {"key_file": str(tmp_path / "key"), "peers": peers} if keyed else {"listen": here.address}
        said, at = json.dumps(settings), there if elsewhere else here
        with (
            begun(here, "consumer", said) as d,
            begun(here, "producer", said) as p,
            begun(at, "carrier", said, at.address) as between,
        ):
            address = between.hear()["address"]
            between.tell(p.hear()["address"])
            p.tell(address)
            d.tell(*p.hear()["source"])
            moved = d.hear()["by"]
            assert moved and "cma" not in moved
