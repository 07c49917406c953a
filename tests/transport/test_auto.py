"""``backend: auto``: the order that back ends declare, and why some are passed over. How links choose: ``session/test_lineup``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.identity import TransferId
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import Probe, auto, available, load
from kvxfer.transport.auto import candidates, choose, options_for
from tests.control.conftest import Ended, engine, fetch, offered

__all__ = ["engine"]
T = TransferId("own/1/x", 0)


class One(FakeTransport):
    name = "one"
    costs = {"cpu": 1, "cuda": 1}


class Two(FakeTransport):
    name = "two"
    costs = {"cpu": 2}
    exclusive = frozenset({"libtwo"})


class Three(FakeTransport):
    name = "three"
    costs = {"cpu": 3}
    exclusive = frozenset({"libtwo"})
    last_resort = True


class Unpriced(FakeTransport):
    name = "unpriced"


class Idle(FakeTransport):
    name = "idle"
    costs = {"cpu": 0}

    @classmethod
    def probe(cls) -> Probe:
        return Probe(False, "no such card")


ONE, TWO, THREE, UNPRICED, IDLE = (f"{__name__}:{cls.__name__}" for cls in (One, Two, Three, Unpriced, Idle))


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have these installed, and no others."""
    monkeypatch.setattr(auto, "available", lambda: dict.fromkeys(names, ""))


def order(memory: str) -> list[str]:
    """The names of all candidates."""
    return [backend.name for backend in auto._declared(memory, Config(backend="auto"))[0]]


def test_what_copies_least_comes_first_and_what_works_everywhere_last() -> None:
    stated = {"cpu": ["cma", "nixl", "ucx", "tcp", "zmq"], "cuda": ["cuda_ipc", "nixl", "ucx", "nccl", "tcp", "zmq"]}
    for memory, names in stated.items():
        assert order(memory) == [name for name in names if name in available()]


def test_the_order_is_that_of_declared_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, THREE, UNPRICED, TWO, ONE)
    assert order("cpu") == ["one", "two", "three"]
    assert order("cuda") == ["one", "three"], "a last resort is there for every kind"


def test_what_does_not_work_is_passed_over_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "nixxl", "no.such.module:Backend", IDLE, "zmq")
    choice = choose("cpu")
    assert list(choice.backends) == ["zmq"]
    assert "did you mean 'nixl'?" in choice.passed["nixxl"]
    assert "cannot be loaded" in choice.passed["no.such.module:Backend"]
    assert choice.passed["idle"] == "no such card"
    assert "zmq" in str(choice) and "nixxl not" in str(choice)


class Mistaken(Idle):
    name = "mistaken"

    @classmethod
    def probe(cls) -> Probe:
        raise RuntimeError("no such driver")


class Silent(Idle):
    name = "silent"

    @classmethod
    def probe(cls) -> Probe:
        return None  # type: ignore[return-value]


def test_mistakes_of_one_back_end_cost_no_other_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "third_party_mistake.py").write_text("raise RuntimeError('built for another driver')")
    monkeypatch.syspath_prepend(tmp_path)
    install(monkeypatch, "third_party_mistake:Backend", f"{__name__}:Mistaken", f"{__name__}:Silent", "zmq")
    choice = choose("cpu")
    assert list(choice.backends) == ["zmq"]
    assert "RuntimeError: built for another driver" in choice.passed["third_party_mistake:Backend"]
    assert choice.passed["mistaken"] == "its probe raised RuntimeError: no such driver"
    assert "its probe returned None" in choice.passed["silent"]


class CostsANumber(One):
    costs = 30  # type: ignore[assignment]


class InheritsAnything(One):
    inherits = frozenset({"port"})


class GuardedAtTimes(One):
    guarded = "sometimes"  # type: ignore[assignment]


@pytest.mark.parametrize(
    "mistaken, words",
    [
        (CostsANumber, "`costs = 30`, which must be a number for each kind of memory"),
        (InheritsAnything, "must be a set of 'advertise' and 'listen', or of one"),
        (GuardedAtTimes, "`guarded = 'sometimes'`, which must be one of 'always', 'loopback', 'never'"),
    ],
)
def test_declarations_that_others_would_stumble_over(
    mistaken: type[FakeTransport], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{__name__}:{mistaken.__name__}"
    install(monkeypatch, name, "zmq")
    choice = choose("cpu")
    assert list(choice.backends) == ["zmq"] and words in choice.passed[name]


def test_none_that_works_is_an_error_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "no.such.module:Backend")
    with pytest.raises(ConfigError, match=r"none that works.*cannot be loaded"):
        choose("cpu")


def test_memory_that_none_can_move_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ONE, TWO, THREE)
    choice = choose("cuda")
    assert list(choice.backends) == ["three"]
    assert "does not move cuda memory" in choice.passed["one"]
    assert "two" not in choice.passed, "it never said that it would"


def test_later_ones_stand_by_if_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "cma", "zmq")
    assert list(choose("cpu").backends) == ["cma", "zmq"]
    assert list(candidates(Config(backend="auto"), ["cpu"])) == ["cma", "zmq"]
    assert "cannot make: zmq" in str(choose("cpu"))
    assert list(candidates(Config(backend="nixl"), ["cpu"])) == ["nixl"], "who names one has that one"


def test_two_that_bring_one_library_are_never_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ONE, TWO, THREE)
    assert list(choose("cpu").backends) == ["one", "two"]
    both = [load(name).exclusive for name in ("nixl", "ucx") if name in available()]
    assert all(both) and len(set(both)) <= 1


def test_one_that_does_not_work_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ONE, TWO, THREE)
    monkeypatch.setattr(Two, "probe", classmethod(lambda cls: Probe(False, "libtwo.so cannot be loaded")))
    choice = choose("cpu")
    assert list(choice.backends) == ["one", "three"] and choice.passed["two"] == "libtwo.so cannot be loaded"


def test_two_of_one_name_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ONE, f"{__name__}:Other")
    choice = choose("cpu")
    assert choice.backends == {"one": One}
    assert "another back end is called 'one'" in choice.passed[f"{__name__}:Other"]


class Other(FakeTransport):
    name = "one"
    costs = {"cpu": 1}


def test_options_are_by_back_end() -> None:
    zmq = load("zmq")
    assert options_for(zmq, Config(backend="zmq", backend_options={"port": 1, "listen": "::1"}))["port"] == 1
    both = Config(backend="auto", backend_options={"cma": {"threads": 1}, "nixl": {"b": 2}, ONE: {"seed": 1}})
    for name, options in {"cma": {"threads": 1}, ONE: {"seed": 1}, TWO: {}}.items():
        assert options_for(load(name), both) == options
    assert options_for(One, Config(backend="auto", backend_options={"one": {"seed": 2}, ONE: {"seed": 2}})) == {
        "seed": 2
    }
    with pytest.raises(ConfigError, match=r"options of each back end under its name.*'listen'"):
        options_for(zmq, Config(backend="auto", backend_options={"listen": "0.0.0.0"}))


THIRD_PARTY = """
from kvxfer.testing.fake import FakeTransport

class RingTransport(FakeTransport):
    name = "ring"
    costs = {"cpu": 5}
"""


@pytest.fixture(params=["entry point", "module:Class"])
def third_party(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A back end of somebody else's, cheaper than all of ours. Returns the settings of an engine that has it, with options for it."""
    (tmp_path / "third_party_ring.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(tmp_path)
    if request.param == "module:Class":
        return {"backend": "auto", "third_party_ring:RingTransport": {"run_bytes": 512}}
    info = tmp_path / "third_party_ring-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party-ring\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvxfer.backends]\nloop = third_party_ring:RingTransport\n")
    return {"backend": "auto", "ring": {"run_bytes": 512}}


def test_another_back_end_joins_and_is_chosen(engine, third_party: dict[str, Any]) -> None:  # noqa: F811
    """With the rights of ours: its place by what it declares, its options by its name, its peers by the name as well."""
    d = engine(dict(third_party))
    p = engine({"backend": "third_party_ring:RingTransport", "run_bytes": 512}, seed=1)
    assert d.agents[0].descriptor.backends[0] == "ring" and p.agents[0].descriptor.backends == ("ring",)
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=T))
    p.agents[0].offer(offered([3, 1], 8, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    backend = d.agents[0]._backends["ring"]
    assert options_for(backend, d.agents[0].config) == {"run_bytes": 512}


@pytest.mark.parametrize(
    ("options", "gets"),
    [
        ({}, {"listen": "127.0.0.1", "advertise": "127.0.0.9"}),
        ({"listen": "127.0.0.2"}, {"listen": "127.0.0.2"}),  # which is then what it advertises, and not 127.0.0.9
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
    engine(dict(options), advertise="127.0.0.9")
    assert seen == [gets]
