"""A peer with the key, on another host, that claims to be a process of this one: engines in networks of their own, by real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvxfer.security import make_key
from tests.conftest import require
from tests.networks import Host, hosts

require("cma")


class Program:
    """One of ``claimant.py``."""

    def __init__(self, host: Host, *arguments: str) -> None:
        command = [*host.into, sys.executable, "-m", "tests.control.claimant", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def program(*arguments: Any) -> Iterator[Program]:
    one = Program(*arguments)
    try:
        yield one
    finally:
        one.end()


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
    with program(here, "keeper", said) as reader, program(here, "keeper", said) as neighbour:
        mine, other = reader.hear(), neighbour.hear()
        named = mine if whom == "the reader itself" else other
        with program(there, "claimant", said, str(named["pid"]), str(named["address"]), str(mine["pid"])) as peer:
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
