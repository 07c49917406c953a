"""Engines whose back ends encrypt: together they deliver, and with one that does not they say at once what is wrong."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvxfer.identity import TransferId
from kvxfer.security import make_key
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
