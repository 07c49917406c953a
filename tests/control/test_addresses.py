"""Where engines are found: addresses of their own, of either version, in networks of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.settings import own_address
from tests.conftest import require
from tests.control.conftest import Ended, Released, SeededEngine, fetch, offered
from tests.networks import Host, hosts

T = TransferId("own/1/x", 0)


def check_transfer(p: SeededEngine, d: SeededEngine) -> None:
    p.agents[0].offer(offered([3], 4, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    assert d.wait(Ended)[0].outcome.delivered
    d.wait(Released)
    assert np.array_equal(d.block(5), p.block(3))


@pytest.mark.parametrize("backend", ["zmq", "tcp"])
@pytest.mark.parametrize(("here", "there"), [("127.0.0.2", "127.0.0.3"), ("::1", "::1"), ("::1", "127.0.0.2")])
def test_engines_at_addresses_of_their_own(
    engine: Callable[..., SeededEngine], backend: str, here: str, there: str
) -> None:
    p = engine({"backend": backend}, seed=1, listen=here)
    d = engine({"backend": backend}, listen=there)
    assert (p.source.host, d.source.host) == (here, there)
    assert here in p.agents[0].descriptor.address
    check_transfer(p, d)


@pytest.fixture
def silent() -> Iterator[Any]:
    """An address that does not answer, as behind a firewall that drops everything: no more fit into its queue."""
    with socket.create_server(("127.0.0.4", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        yield full.getsockname()


@pytest.mark.parametrize(
    "first",
    [(socket.AF_INET, ("127.0.0.2", 1)), (socket.AF_X25, ("127.0.0.2", 1)), (socket.AF_INET, None)],
    ids=["nobody listens there", "this host lacks its family", "it is silent"],
)
def test_a_name_of_several_addresses_leads_to_the_one_that_answers(
    engine: Callable[..., SeededEngine], first: tuple[int, Any], silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = socket.getaddrinfo

    def found(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "node-7":
            return looked_up(host, port, *args, **kwargs)
        if kwargs.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return [
            (family, socket.SOCK_STREAM, 0, "", at or silent)
            for family, at in (first, (socket.AF_INET, ("127.0.0.1", port)))
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    p = engine({"backend": "tcp"}, seed=1, advertise="node-7")
    check_transfer(p, engine({"backend": "tcp"}))


def test_an_engine_is_not_gone_because_one_of_its_addresses_refuses(
    engine: Callable[..., SeededEngine], silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another is silent, it may only be slow."""
    looked_up, places = socket.getaddrinfo, (silent, ("127.0.0.2", 1))

    def found(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "node-7":
            return looked_up(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", at) for at in places]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    d = engine({})
    d.agents[0].fetch(fetch(Source("node-7", 7000, 1), [5], 4, transfer=T))
    failure = d.wait(Ended)[0].outcome.failure
    assert failure is not None and failure.kind is FailureKind.PEER_UNREACHABLE, failure


def test_each_process_finds_its_own_address() -> None:
    config = Config(advertise="auto", port=7)
    found = config.located(lambda: "10.0.0.7")
    assert (found.listen, found.advertise, found.port) == ("10.0.0.7", "10.0.0.7", 7)
    everywhere = Config(advertise="auto", listen="0.0.0.0").located(lambda: "10.0.0.7")
    assert (everywhere.listen, everywhere.advertise) == ("0.0.0.0", "10.0.0.7")
    named = Config(advertise="node-7", listen="10.0.0.7")
    assert named.located(lambda: "10.0.0.8") is named


def test_engines_that_find_their_own_address(engine: Callable[..., SeededEngine]) -> None:
    try:
        here = own_address()
    except ConfigError:
        pytest.skip("no route leads out of this host")
    p, d = (engine({"backend": "zmq"}, seed=seed, advertise="auto") for seed in (1, None))
    assert p.source.host == here
    check_transfer(p, d)


ON_A_HOST = """
import sys
from tests.control.node import NodeEngine, name
e = NodeEngine("zmq", seed=int(sys.argv[1]), advertise="auto", transfer_timeout=20.0)
print(e.source.host, e.source.port, e.source.epoch, flush=True)
if int(sys.argv[1]):
    e.offer(name("x"), [3], 4, 1, True)
    sys.stdin.read()
else:
    from kvxfer.identity import Source
    from kvxfer.protocol.values import Ended
    host, port, epoch = sys.stdin.readline().split()
    e.fetch(name("x"), Source(host, int(port), int(epoch)), [5], 4)
    print([end.outcome.delivered for end in e.wait(Ended, timeout=30.0)], flush=True)
e.close()
"""


def test_two_hosts() -> None:
    require("networks")

    def begin(host: Host, seed: int) -> Any:
        return subprocess.Popen(
            [*host.into, sys.executable, "-c", ON_A_HOST, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with hosts(2) as (alice, bob):
        p, d = begin(alice, 1), begin(bob, 0)
        try:
            address = p.stdout.readline()
            assert address.split()[0] == alice.address and d.stdout.readline().split()[0] == bob.address
            assert d.communicate(address, timeout=300)[0].strip() == "[True]"
            p.communicate("", timeout=300)
        finally:
            for process in (p, d):
                process.kill()
                process.wait()
