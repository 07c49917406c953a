"""An engine in a process of its own, as an operator has it: its settings, its log, its metrics; it makes steps without end.

The program reads commands, lines of JSON, and answers each with a line.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvxfer.engine import Ticket
from kvxfer.identity import Source
from kvxfer.protocol.values import Ended
from kvxfer.testing.engine import PagedEngine
from kvxfer.testing.engine.memory import PagedMemory

__all__ = ["TOKENS", "Played", "playing"]

TOKENS = 16
PATIENCE_S = 60.0


class Played:
    """Such an engine, as its operator sees it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self._log = process, log
        told = self._answer()
        self.host, self.port, self.rank = str(told["host"]), int(told["port"]), str(told["rank"])
        self.at = f"{self.host}:{self.port}"

    def __call__(self, command: str, **words: Any) -> Any:
        """Have it do something, and return what it answers."""
        assert self.process.stdin is not None
        print(json.dumps([command, words]), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], PATIENCE_S)[0]
        line = self.process.stdout.readline() if ready else ""
        assert line, self.log
        return json.loads(line)

    def offer(self, name: str, tokens: int = TOKENS) -> str:
        return str(self("offer", name=name, tokens=tokens))

    def load(self, name: str, ticket: str, **more: Any) -> str:
        """Load, and return why that has failed; nothing if it has not."""
        return str(self("load", name=name, ticket=ticket, **more))

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def failures(self) -> list[tuple[str, str]]:
        """The kinds of loads that failed, and their peers, from which `kvxfer_failures_total` takes the host."""
        return [(kind, peer) for kind, peer in self("failures")]


@contextmanager
def playing(
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    *,
    before: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    facts: Mapping[str, str] | None = None,
) -> Iterator[Played]:
    """Run such an engine; ``before`` is put in front of the command.

    Yields:
        The engine, which has begun.
    """
    log = folder / f"{name}.log"
    told = json.dumps([name, dict(config), dict(facts) if facts else None])
    path = os.pathsep.join([os.getcwd(), *sys.path[1:]])
    with log.open("w") as file:
        process = subprocess.Popen(
            [*before, sys.executable, "-W", "ignore", "-m", "tests.playing", told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
        )
    try:
        yield Played(process, log)
    finally:
        process.kill()
        process.communicate()


def _play(name: str, config: dict[str, Any], facts: dict[str, str] | None) -> None:
    """Be the engine until nobody talks to it any more."""
    ends: list[Ended] = []
    more = {} if facts is None else {"facts": facts}
    with PagedEngine(config, PagedMemory(blocks=64, tokens=TOKENS), name=name, on_ended=ends.append, **more) as engine:
        engine.step()
        source = engine.scheduler.source
        _say({"host": source.host, "port": source.port, "rank": engine.worker.agent.descriptor.address})
        while True:
            if not select.select([sys.stdin], [], [], 0.01)[0]:
                engine.step()
                continue
            line = sys.stdin.readline()
            if not line:
                return
            command, words = json.loads(line)
            _say(COMMANDS[command](engine, ends, **words))


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _offer(engine: PagedEngine, ends: list[Ended], name: str, tokens: int) -> str:
    return engine.offer(name, tokens).text


def _load(
    engine: PagedEngine,
    ends: list[Ended],
    name: str,
    ticket: str,
    port: int = 0,
    host: str = "",
    wait: bool = True,
    **more: Any,
) -> str:
    """Load from where the ticket says, or from another port or host."""
    read = Ticket.read(ticket)
    if port or host:  # as a router names an engine, which does not know its epoch
        source = Source(host or read.source.host, port or read.source.port, 0)
        read = Ticket(read.transfer, read.digest, source)
    engine.load(name, read, TOKENS, **more)
    if wait:
        engine.until(name, PATIENCE_S)
    return str(engine.failed.get(name, ""))


def _failures(engine: PagedEngine, ends: list[Ended]) -> list[tuple[str, str]]:
    failed = [end.outcome.failure for end in ends if end.role == "consumer"]
    return [(str(why.kind), why.peer) for why in failed if why is not None]


def _wait(engine: PagedEngine, ends: list[Ended], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.step()


COMMANDS: Mapping[str, Callable[..., Any]] = {"offer": _offer, "load": _load, "failures": _failures, "wait": _wait}

if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    _play(*json.loads(sys.argv[1]))
