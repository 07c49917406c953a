"""``backend: auto``: a stated order, the reason of each that was passed over, and both engines with the same answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError, TransportError
from kvxfer.identity import TransferId
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import auto
from kvxfer.transport.auto import ORDER, choose, resolve
from tests.session.conftest import Ended, engine, fetch, offered

__all__ = ["engine"]
T = TransferId("own/1/x", 0)


def test_same_host_back_ends_come_first_and_only_where_all_peers_are_on_it() -> None:
    for memory, same in (("cpu", "cma"), ("cuda", "cuda_ipc")):
        assert ORDER[memory, True][0] == same
        assert same not in ORDER[memory, False]
        assert all(ORDER[memory, host][-1] == "zmq" for host in (True, False)), "what works everywhere is the last resort"


def test_loopback_means_one_host() -> None:
    assert Config().one_host
    assert Config(listen="localhost").one_host
    assert not Config(listen="0.0.0.0", advertise="10.1.2.3").one_host
    assert not Config(listen="0.0.0.0").one_host
    assert not Config(listen="decode-7.cluster").one_host


def test_what_does_not_work_is_passed_over_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ORDER", {("cpu", True): ("nixxl", "no.such.module:Backend", "zmq")})
    choice = choose("cpu", True)
    assert choice.name == "zmq"
    assert "did you mean 'nixl'?" in choice.passed["nixxl"]
    assert "cannot be loaded" in choice.passed["no.such.module:Backend"]
    assert "zmq" in str(choice) and "nixxl not" in str(choice)


def test_none_that_works_is_an_error_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ORDER", {("cpu", True): ("no.such.module:Backend",)})
    with pytest.raises(ConfigError, match=r"none that works.*cannot be loaded"):
        choose("cpu", True)


def test_gpu_memory_without_a_gpu_back_end_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ORDER", {("cuda", True): ("cma", "zmq")})
    choice = choose("cuda", True)
    assert choice.name == "zmq"
    assert "does not move cuda memory" in choice.passed["cma"]


def test_options_are_by_back_end() -> None:
    assert resolve("zmq", {"port": 1}, ["cpu"], True) == ("zmq", {"port": 1})
    name, options = resolve("auto", {"zmq": {"a": 1}, "nixl": {"b": 2}}, ["cpu"], False)
    assert options == {"zmq": {"a": 1}, "nixl": {"b": 2}}.get(name, {})
    with pytest.raises(ConfigError, match=r"options of each back end under its name.*'listen'"):
        resolve("auto", {"listen": "0.0.0.0"}, ["cpu"], False)


@pytest.mark.parametrize("theirs", ["auto", "the same by name"])
def test_two_engines_agree(engine, theirs) -> None:  # noqa: F811
    chosen = choose("cpu", True).name
    p = engine({"backend": chosen if theirs != "auto" else "auto"}, seed=1)
    d = engine({"backend": "auto"})
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=T))
    p.agents[0].offer(offered([3, 1], 8, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    assert (d.block(5) == p.block(3)).all() and (d.block(2) == p.block(1)).all()


def test_two_engines_that_differ_are_told_both_names(engine) -> None:  # noqa: F811
    p, d = engine({"backend": "zmq"}, seed=1), engine({"backend": "auto"})
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=T))
    p.agents[0].offer(offered([3, 1], 8, transfer=T))
    (end,) = d.wait(Ended)
    assert not end.outcome.delivered
    assert "zmq" in str(end) and choose("cpu", True).name in str(end)


def test_sockets_of_the_back_end_listen_where_the_engine_does(engine) -> None:  # noqa: F811
    """An operator of several hosts says it once."""
    with pytest.raises(TransportError, match=r"cannot listen on 198\.51\.100\.7 port"):  # of nobody: RFC 5737
        engine({"backend": "zmq"}, listen="198.51.100.7")


@pytest.mark.parametrize(
    ("options", "gets"),
    [
        ({}, {"listen": "127.0.0.1", "advertise": "node-7"}),
        ({"listen": "127.0.0.2"}, {"listen": "127.0.0.2"}),  # which is then what it advertises, and not node-7
    ],
    ids=["none of its own", "one of its own"],
)
def test_what_a_back_end_inherits(engine, monkeypatch: pytest.MonkeyPatch, options: Any, gets: Any) -> None:  # noqa: F811
    seen: list[Mapping[str, Any]] = []
    make = FakeTransport.__init__

    def recording(self: FakeTransport, agent: str, given: Mapping[str, Any]) -> None:
        seen.append(given)
        make(self, agent, {})

    monkeypatch.setattr(FakeTransport, "__init__", recording)
    monkeypatch.setattr(FakeTransport, "inherits", frozenset({"listen", "advertise"}))
    engine(dict(options), advertise="node-7")
    assert seen == [gets]
