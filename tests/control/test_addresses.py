"""Where engines are found: addresses of their own, of either version, in networks of their own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.errors import ConfigError
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from tests.control.conftest import Ended, Released, SeededEngine, fetch, offered

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


def test_a_name_is_looked_up_where_it_is_said_and_nowhere_else(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, asked = socket.getaddrinfo, list[str]()

    def found(host: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(host)
        return looked_up("127.0.0.1" if host == "node-7" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    p = engine({"backend": "tcp"}, seed=1, advertise="node-7")
    assert p.source.host == "127.0.0.1" and "node-7" in asked
    d = engine({"backend": "tcp"})
    check_transfer(p, d)
    asked.clear()
    d.agents[0].fetch(fetch(Source("node-7", p.source.port, 1), [6], 4, transfer=T, handle="named"))
    failure = d.over("named").outcome.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED and "is a name" in failure.detail
    assert "node-7" not in asked
    with pytest.raises(ConfigError, match="'advertise' is 'no-such-host.invalid', which this host cannot resolve"):
        Directory(Config(advertise="no-such-host.invalid"))
    with pytest.raises(ConfigError, match="'peers': 'node-7:1' is a name"):
        Directory(Config(peers=("node-7:1",)))


@pytest.mark.parametrize("peers", [["localhost"], [" LOCALHOST ", "10.0.0.0/8"], ["localhost:1"]])
def test_localhost_is_no_name_that_is_looked_up(engine: Callable[..., SeededEngine], peers: list[str]) -> None:
    p, d = engine({}, seed=1, peers=peers), engine({})
    p.agents[0].offer(offered([3], 4, transfer=T))
    d.agents[0].fetch(fetch(Source("localhost", p.source.port, p.source.epoch), [5], 4, transfer=T))
    assert d.wait(Ended)[0].outcome.delivered


def test_each_process_finds_its_own_address() -> None:
    config = Config(advertise="auto", port=7)
    found = config.located(lambda: "10.0.0.7")
    assert (found.listen, found.advertise, found.port) == ("10.0.0.7", "10.0.0.7", 7)
    everywhere = Config(advertise="auto", listen="0.0.0.0").located(lambda: "10.0.0.7")
    assert (everywhere.listen, everywhere.advertise) == ("0.0.0.0", "10.0.0.7")
    named = Config(advertise="node-7", listen="10.0.0.7")
    assert named.located(lambda: "10.0.0.8") is named
