"""Engines whose back ends encrypt: together they deliver, and with one that does not they say at once what is wrong."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.security import make_key
from kvxfer.transport.registry import load
from tests.control.conftest import Ended, SeededEngine, fetch, offered

T = TransferId("own/1/x", 0)


@pytest.mark.parametrize("backend", ["tcp", "zmq"])
def test_engines_that_encrypt(engine: Callable[..., SeededEngine], backend: str, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    key = str(tmp_path / "key")
    p, d = (engine({"backend": backend, "encrypt": True}, seed=seed, key_file=key) for seed in (1, None))
    p.agents[0].offer(offered([3], 4, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    assert d.wait(Ended)[0].outcome.delivered
    assert np.array_equal(d.block(5), p.block(3))


@pytest.mark.parametrize("backend", ["tcp", "zmq"])
@pytest.mark.parametrize("producer", [True, False])
def test_one_that_encrypts_and_one_that_does_not(
    engine: Callable[..., SeededEngine], backend: str, producer: bool
) -> None:
    p, d = (
        engine({"backend": backend, "encrypt": encrypts}, seed=seed)
        for encrypts, seed in ((producer, 1), (not producer, None))
    )
    before = d.block(5).copy()
    p.agents[0].offer(offered([3], 4, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    failure = d.wait(Ended)[0].outcome.failure
    assert failure is not None
    assert (
        "encrypts and" in failure.detail
        and f"set option 'encrypt' of back end '{backend}' to the same value" in failure.detail
    )
    assert np.array_equal(d.block(5), before)


@pytest.mark.parametrize("backend", ["tcp", "zmq"])
def test_both_sides_encrypt_or_neither(backend: str) -> None:
    kind = load(backend)
    a, b = kind("a", {"encrypt": True}), kind("b", {})
    try:
        mine, theirs = a.endpoint(), b.endpoint()
        with pytest.raises(TransportError, match="this side encrypts and 'b' does not; set option 'encrypt'"):
            a.connect(mine, theirs)
        with pytest.raises(TransportError, match="'a' encrypts and this side does not"):
            b.connect(theirs, mine)
    finally:
        a.close()
        b.close()


@pytest.mark.parametrize("here, there", [("", "a"), ("a", ""), ("a", "b")], ids=["only there", "only here", "another"])
def test_who_is_turned_away_for_the_key_is_told_to_look_at_it(
    engine: Callable[..., SeededEngine], here: str, there: str, tmp_path: Path
) -> None:
    for key in {here, there} - {""}:
        make_key(tmp_path / key)
    d, p = (engine({}, key_file=str(tmp_path / key) if key else None) for key in (here, there))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    failure = d.wait(Ended)[0].outcome.failure
    assert failure is not None and failure.kind is FailureKind.REFUSED
    assert "'key_file'" in failure.advice
