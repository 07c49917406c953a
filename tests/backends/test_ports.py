"""Which ports an engine opens with each back end, asked of the system from outside, and what a link shows of its memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from kvxfer.security import make_key
from tests.conftest import require

ENGINE = """
import json, sys, time
from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.data.commands import MakeEndpoint
from kvxfer.testing.engine import PagedMemory
config, memory = Config.from_mapping(json.loads(sys.argv[1])), PagedMemory()
agent = Agent(memory.caches[0], config, sys.argv[2])
data = agent._data._first
data.post(MakeEndpoint(("nobody", 1), 1, config.backend, "consumer"))  # some open a port for each link
while not data._traffic._unused:
    time.sleep(0.01)
print("ready", flush=True)
sys.stdin.read()
agent.close()
"""


@contextmanager
def engine(**config: Any) -> Iterator[int]:
    """The process number of an engine that has begun a link."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    child = subprocess.Popen(
        [sys.executable, "-c", ENGINE, json.dumps(config), "7"],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        while "ready" not in (line := child.stdout.readline()):
            assert line, "the engine has died"
        yield child.pid
    finally:
        child.stdin.close()
        child.wait(30)


def ports(pid: int) -> list[str]:
    """Addresses of the TCP ports on which a process accepts connections."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and f"socket:[{inode}]" in own:
                raw = bytes.fromhex(local.partition(":")[0])
                address = ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
                found.append(str(getattr(address, "ipv4_mapped", None) or address))
    return sorted(found)


def own_address() -> str:
    """An address of this host that others reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.254", 9))  # of nobody (RFC 5737); nothing is sent
        except OSError:
            pytest.skip("this host has no address but loopback")
        address = str(asking.getsockname()[0])
    if ip_address(address).is_loopback:
        pytest.skip("this host has no address but loopback")
    return address


BULK = {"zmq": 1, "tcp": 1, "cma": 0, "nixl": 0, "ucx": 0}
"""TCP ports of each back end on loopback."""


@pytest.mark.parametrize("backend", BULK)
@pytest.mark.parametrize("key", [False, True], ids=["open", "key"])
def test_on_loopback_there_is_no_port_that_asks_for_nothing(backend: str, key: bool, tmp_path: Path) -> None:
    """Back ends that have a UCX in them opened ports at every device, where anybody could read and write this process's memory."""
    require(backend)
    keyed = {}
    if key:
        make_key(tmp_path / "key")
        keyed = {"key_file": str(tmp_path / "key")}
    with engine(backend=backend, **keyed) as pid:
        assert ports(pid) == ["127.0.0.1"] * (1 + BULK[backend])


@pytest.mark.parametrize("backend", ["nixl", "ucx", "zmq", "tcp"])
def test_at_an_address_every_port_is_at_that_address(backend: str) -> None:
    require(backend)
    address = own_address()
    with engine(backend=backend, listen=address) as pid:
        found = ports(pid)
    assert set(found) == {address} and len(found) > 1


@pytest.mark.parametrize("backend", ["nixl", "ucx"])
def test_on_loopback_who_names_tcp_has_it_on_loopback(backend: str) -> None:
    require(backend)
    with engine(backend=backend, backend_options={"ucx": {"TLS": "tcp"}}) as pid:
        found = ports(pid)
    assert set(found) == {"127.0.0.1"} and len(found) > 1


def test_an_address_that_is_not_of_this_host_is_named() -> None:
    require("nixl")
    with pytest.raises(AssertionError, match="died"), engine(backend="nixl", listen="198.51.100.7"):
        pass
