"""A stand-in of `kvxfer doctor` in a process of its own, which loads nothing that it does not need."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.cli.stand_in import StandIn
from kvxfer.config import Config

__all__ = ["standing_in"]

_spawn = mp.get_context("spawn")


@contextmanager
def standing_in(**config: Any) -> Iterator[str]:
    """Have an engine with these settings stood in for, and give its address."""
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=_serve, args=(theirs, config), daemon=True)
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
