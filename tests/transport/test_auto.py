"""``backend: auto``: a stated order, and the reason of each that was passed over. How links choose: ``session/test_lineup``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.identity import TransferId
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import auto
from kvxfer.transport.auto import ORDER, choose, lineup, options_of
from tests.control.conftest import Ended, engine, fetch, offered

__all__ = ["engine"]
T = TransferId("own/1/x", 0)


def test_what_copies_least_comes_first_and_what_works_everywhere_last() -> None:
    for memory, same in (("cpu", "cma"), ("cuda", "cuda_ipc")):
        assert ORDER[memory][0] == same and ORDER[memory][-1] == "zmq"


def test_what_does_not_work_is_passed_over_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ORDER", {"cpu": ("nixxl", "no.such.module:Backend", "zmq")})
    choice = choose("cpu")
    assert choice.name == "zmq"
    assert "did you mean 'nixl'?" in choice.passed["nixxl"]
    assert "cannot be loaded" in choice.passed["no.such.module:Backend"]
    assert "zmq" in str(choice) and "nixxl not" in str(choice)


def test_none_that_works_is_an_error_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ORDER", {"cpu": ("no.such.module:Backend",)})
    with pytest.raises(ConfigError, match=r"none that works.*cannot be loaded"):
        choose("cpu")


def test_gpu_memory_without_a_gpu_back_end_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ORDER", {"cuda": ("cma", "zmq")})
    choice = choose("cuda")
    assert choice.name == "zmq"
    assert "does not move cuda memory" in choice.passed["cma"]


def test_later_ones_stand_by_if_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ORDER", {"cpu": ("cma", "nixxl", "zmq")})
    assert choose("cpu").others == ("zmq",)
    assert lineup("auto", ["cpu"]) == ("cma", "zmq")
    assert "cannot make: zmq" in str(choose("cpu"))
    assert lineup("nixl", ["cpu"]) == ("nixl",), "who names one has that one"


@pytest.mark.parametrize(("first", "left"), [("zmq", ("nixl", "cma")), ("nixl", ("cma",))])
def test_nixl_and_ucx_are_never_in_one_process(monkeypatch: pytest.MonkeyPatch, first: str, left: tuple[str]) -> None:
    monkeypatch.setattr(auto, "ORDER", {"cpu": tuple(dict.fromkeys((first, "nixl", "ucx", "cma")))})
    monkeypatch.setattr(auto, "available", lambda: dict.fromkeys(("zmq", "nixl", "ucx", "cma"), ""))
    monkeypatch.setattr(auto, "load", lambda _: FakeTransport)
    assert lineup("auto", ["cpu"]) == (first, *left)


def test_options_are_by_back_end() -> None:
    assert options_of("zmq", "zmq", {"port": 1}) == {"port": 1}
    for name, options in {"zmq": {"a": 1}, "nixl": {"b": 2}, "cma": {}}.items():
        assert options_of(name, "auto", {"zmq": {"a": 1}, "nixl": {"b": 2}}) == options
    with pytest.raises(ConfigError, match=r"options of each back end under its name.*'listen'"):
        options_of("zmq", "auto", {"listen": "0.0.0.0"})


def test_options_that_do_not_fit_are_an_error_at_start(engine) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"options of each back end under its name.*'listen'"):
        engine({"backend": "auto", "listen": "0.0.0.0"})


@pytest.mark.parametrize("theirs", ["auto", "the same by name", "zmq"])
def test_two_engines_meet(engine, theirs) -> None:  # noqa: F811
    p = engine({"backend": choose("cpu").name if theirs == "the same by name" else theirs}, seed=1)
    d = engine({"backend": "auto"})
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=T))
    p.agents[0].offer(offered([3, 1], 8, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    assert (d.block(5) == p.block(3)).all() and (d.block(2) == p.block(1)).all()


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
