"""An IPv6 address may be written with brackets or without, in any of its forms, everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.identity import Source
from kvxfer.settings import bare, everywhere, loopback
from kvxfer.testing.engine import AgentEngine
from tests.test_security import engine as engine
from tests.test_security import outcome

FORMS = ("[::1]", "::1", "[0:0:0:0:0:0:0:1]", "0000::0001")


@pytest.mark.parametrize("text", FORMS)
def test_there_is_one_form(text: str) -> None:
    config = Config.from_mapping({"listen": text, "advertise": text})
    assert (config.listen, config.advertise) == ("::1", "::1")
    assert loopback(text) and bare(text) == "::1"
    assert str(Source(bare(text), 14579, 1)) == "[::1]:14579"


def test_what_is_no_address_stays() -> None:
    for text in ("localhost", "gpu-7.example", "[gpu-7]", "*", "10.0.0.1", "fe80::1%eth0"):
        assert bare(text) == text
    assert bare("FD00::A") == "fd00::a"


@pytest.mark.parametrize("text", ["::", "[::]", "0::0", "[0:0:0:0:0:0:0:0]"])
def test_a_wildcard_is_one_in_any_form(text: str) -> None:
    assert everywhere(text)
    with pytest.raises(ConfigError, match="which peers cannot dial"):
        Config.from_mapping({"listen": text})


@pytest.mark.parametrize("backend", ["tcp", "zmq", "cma"])
@pytest.mark.parametrize(
    "settings",
    [{"listen": form} for form in FORMS]
    + [{"listen": "[::]", "advertise": "[::1]"}, {"listen": "::", "advertise": "127.0.0.1"}],
    ids=lambda settings: " ".join(settings.values()),
)
def test_engines_find_each_other(engine: Callable[..., AgentEngine], backend: str, settings: dict[str, str]) -> None:
    p, d = (engine(backend=backend, backend_options={}, **settings) for _ in range(2))
    assert outcome(p, d).outcome.delivered
    p, d = (engine(backend=backend, backend_options={}, peers=["::1", "127.0.0.1"], **settings) for _ in range(2))
    assert outcome(p, d).outcome.delivered
