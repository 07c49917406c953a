"""A peer with the key, on another host, that claims to be a process of this one: engines in networks of their own, by real processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvxfer.security import make_key
from tests.conftest import require
from tests.networks import Host, hosts, program

require("cma")


claimant = partial(program, "tests.control.claimant")


@pytest.fixture(scope="module")
def apart() -> Iterator[list[Host]]:
    require("networks")
    with hosts(2) as two:
        yield two


def settings(tmp_path: Path, two: list[Host]) -> str:
    key = tmp_path / "key.pem"
    if not key.exists():
        make_key(key)
    return json.dumps({"key_file": str(key), "peers": [host.address for host in two]})


@pytest.mark.timeout(180)
@pytest.mark.parametrize("whom", ["the reader itself", "a neighbour of the reader"])
def test_nothing_is_read_from_a_process_that_the_peer_is_not(apart: list[Host], tmp_path: Path, whom: str) -> None:
    """The reader goes on to a back end that needs no common host, and has the claimant's own bytes by that."""
    here, there = apart
    said = settings(tmp_path, apart)
    with claimant(here, "keeper", said) as reader, claimant(here, "keeper", said) as neighbour:
        mine, other = reader.hear(), neighbour.hear()
        named = mine if whom == "the reader itself" else other
        with claimant(there, "claimant", said, str(named["pid"]), str(named["address"]), str(mine["pid"])) as peer:
            reader.tell(*peer.hear()["source"])
            got = reader.hear()
            assert got["delivered"] == [True]
            assert not got["secret"] and got["whole"] and got["by"] and "cma" not in got["by"]
            peer.tell()
            told = [bytes.fromhex(one) for one in peer.hear()["told"]]
    assert told
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for one in told:
        assert boot.encode() not in one and boot.replace("-", "").encode() not in one
        for namespace in ("pid", "net", "ipc", "mnt"):
            inode = os.stat(f"/proc/self/ns/{namespace}").st_ino
            assert inode.to_bytes(4) not in one or inode < 1 << 16
        assert mine["pid"].to_bytes(4) not in one
        assert (mine["address"] >> 20).to_bytes(6)[2:] not in one, "part of an address"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("key", ["with a key, elsewhere", "with a key, on their host", "without a key, elsewhere"])
def test_who_stands_between_two_engines_of_a_host_does_not_make_them_peers(
    apart: list[Host], tmp_path: Path, key: str
) -> None:
    """Each has its control connection with the carrier, which may not have one copy from the other's memory for it."""
    here, there = apart
    said = settings(tmp_path, apart) if key.startswith("with a") else json.dumps({"listen": here.address})
    at = there if key.endswith("elsewhere") else here
    with claimant(here, "keeper", said) as reader, claimant(here, "offerer", said) as other:
        reader.hear()
        with claimant(at, "carrier", said, at.address) as between:
            between_at = between.hear()["address"]
            between.tell(other.hear()["address"])
            other.tell(between_at)
            reader.tell(*other.hear()["source"])
            got = reader.hear()
            assert got["by"] and "cma" not in got["by"], got
