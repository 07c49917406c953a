"""What `kvxfer doctor` begins, as forks of a process that has imported kvxfer and no library: a stand-in, and who asks back ends."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.cli import probing
from kvxfer.cli.stand_in import StandIn
from kvxfer.config import Config

__all__ = ["asked_by_forks", "standing_in"]

_forks = mp.get_context("forkserver")
_forks.set_forkserver_preload(["kvxfer.testing.engine", "kvxfer.cli.probing", "kvxfer.cli.stand_in"])


@pytest.fixture(autouse=True)
def asked_by_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where doctor asks back ends by a new interpreter, it takes a fork here."""
    monkeypatch.setattr(probing, "multiprocessing", SimpleNamespace(get_context=lambda way: _forks))


@contextmanager
def standing_in(**config: Any) -> Iterator[str]:
    """Have an engine with these settings stood in for, and give its address."""
    ours, theirs = _forks.Pipe()
    process = _forks.Process(target=_serve, args=(theirs, config), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60.0)
        yield ours.recv()
    finally:
        ours.close()  # which it notices
        process.join(20)
        ended = process.exitcode
        process.kill()
    assert ended == 0


def _serve(pipe: Connection, config: dict[str, Any]) -> None:
    engine = StandIn(Config.from_mapping(config))
    pipe.send(str(engine.source))
    while not pipe.poll():
        engine.serve(0.1)
    engine.close()
