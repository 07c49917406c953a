"""A back end that cannot authenticate is taken only where nobody but this host reaches it and no key is set, or where the operator has
named it."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from kvxfer.backend.ports import listening
from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.failures import FailureKind
from kvxfer.protocol import messages as m
from kvxfer.settings import own_address
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import auto, load
from kvxfer.transport.auto import candidates
from tests.control.conftest import engine
from tests.control.stranger import Stranger, hello

__all__ = ["engine"]


class Near(FakeTransport):
    """Asks everybody for a secret."""

    name = "near"
    costs = {"cpu": 3}


class Loose(FakeTransport):
    """Asks nobody, but opens nothing on loopback."""

    name = "loose"
    costs = {"cpu": 1}
    guarded = "loopback"


class Open(FakeTransport):
    name = "open"
    costs = {"cpu": 2}
    guarded = "never"


NEAR, LOOSE, OPEN = (f"tests.transport.test_guard:{c.__name__}" for c in (Near, Loose, Open))


@pytest.fixture(autouse=True)
def order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "available", lambda: dict.fromkeys((LOOSE, OPEN, NEAR), ""))


@pytest.mark.parametrize(
    ("key", "listen", "options", "left"),
    [
        (False, "127.0.0.1", {}, ("loose", "open", "near")),
        (False, "0.0.0.0", {}, ("near",)),
        (False, "10.0.0.7", {LOOSE: {}}, ("loose", "near")),
        (True, "127.0.0.1", {}, ("loose", "near")),
        (True, "10.0.0.7", {}, ("near",)),
        (True, "10.0.0.7", {LOOSE: {}}, ("loose", "near")),
        (True, "0.0.0.0", {OPEN: {}}, ("open", "near")),
    ],
)
def test_what_auto_takes(key: bool, listen: str, options: dict[str, Any], left: tuple[str, ...], caplog: Any) -> None:
    config = Config(
        backend="auto", listen=listen, advertise="node", key_file="key" if key else None, backend_options=options
    )
    with caplog.at_level(logging.INFO):
        assert tuple(candidates(config, ["cpu"])) == left
    for name in {"loose", "open", "near"} - set(left):
        assert name in caplog.text and "needs no key" in caplog.text
    for name in options:
        why = "a key is set" if key else f"other hosts can reach {listen}"
        assert f"back end {load(name).name} may be used although {why}, because it was asked for by name" in caplog.text


@pytest.mark.parametrize("key", [None, "key"])
def test_a_trusted_network_lets_auto_take_all_and_says_so(key: str | None, caplog: Any) -> None:
    config = Config(backend="auto", listen="10.0.0.7", key_file=key, trust_network=True)
    assert tuple(candidates(config, ["cpu"])) == ("loose", "open", "near")
    for name in ("loose", "open"):
        assert f"back end {name} may be used although" in caplog.text
    assert caplog.text.count("because 'trust_network' is set") == 2 and "near may be used" not in caplog.text


def test_an_engine_with_gpus_is_told_once_what_its_network_would_allow(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in (Near, Loose, Open):
        monkeypatch.setattr(backend, "costs", {"cuda": backend.costs["cpu"]})
        monkeypatch.setattr(backend, "last_resort", True)
    candidates(Config(backend="auto", listen="10.0.0.7"), ["cuda:0"])
    [told] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "leaves out loose, open" in told and "set 'trust_network'" in told
    caplog.clear()
    candidates(Config(backend="auto"), ["cuda:0"])
    assert not [r for r in caplog.records if r.levelno == logging.WARNING], "nothing leaves this host"


def test_who_names_one_has_it_and_is_warned(caplog: Any) -> None:
    config = Config(backend=OPEN, key_file="key")
    assert tuple(candidates(config, ["cpu"])) == ("open",)
    assert "may be used although a key is set" in caplog.text


class Ajar(Loose):
    """A back end that stands by, and opens a port once it is loaded."""

    name = "ajar"
    costs = {"cpu": 4}

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, {})
        self.port = socket.create_server(("", 0))

    def close(self) -> None:
        super().close()
        self.port.close()


@pytest.mark.parametrize("named", [False, True], ids=["not named", "named"])
def test_no_hello_opens_a_port_that_asks_nobody(engine: Any, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:  # noqa: F811
    """Also without a key, where others than this host reach the engine."""
    try:
        here = own_address()
    except ConfigError:
        pytest.skip("no route leads out of this host")
    ajar = "tests.transport.test_guard:Ajar"
    monkeypatch.setattr(auto, "available", lambda: dict.fromkeys((NEAR, ajar), ""))
    options = {ajar: {}} if named else {}
    e = engine({"backend": "auto", **options}, listen=here)
    before = listening()
    with Stranger(e.agents[0].descriptor.address) as s:
        s.say(hello(e, backend="ajar"))
        answer = s.answer()
    assert isinstance(answer, m.Refused)
    if named:
        assert len(listening() - before) == 1
    else:
        assert answer.kind is FailureKind.INCOMPATIBLE and listening() == before
