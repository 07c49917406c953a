"""A class that is no back end, or one of another day, is refused when it is loaded, by what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.testing import FakeTransport
from kvxfer.transport import registry


def refused(target: str) -> str:
    with pytest.raises(ConfigError) as caught:
        registry.load(target)
    assert repr(target) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"name": ""}, "has no name"),
        ({"contract": None}, "does not say which transport contract"),
        ({"contract": 99}, "was written for transport contract 99"),
        ({"costs": {"cpu": "dear"}}, "a number for each kind of memory"),
        ({"inherits": ["port"]}, "`inherits = ['port']`"),
        ({"inherits": frozenset({"luck"})}, "must be a set of"),
    ],
    ids=str,
)
def test_what_a_back_end_declares(declared: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = type("Declared", (FakeTransport,), {"name": "declared", **declared})
    monkeypatch.setattr(f"{__name__}.Declared", made, raising=False)
    assert said in refused(f"{__name__}:Declared")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nonesuch", "unknown back end"),
        ("no.such.module:Backend", "cannot be loaded"),
        (f"{__name__}:Nobody", "cannot be loaded"),
        (f"{__name__}:refused", "is not a kvxfer.transport.Transport class"),
        ("kvxfer.errors:ConfigError", "is not a kvxfer.transport.Transport class"),
    ],
)
def test_what_is_no_back_end(target: str, said: str) -> None:
    assert said in refused(target)
