"""Real servers for benchmarks: started on the GPUs that are named, asked in turns, and all ended together."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import typer

from kvxfer.cli.terminal import Say, silent
from kvxfer.errors import ConfigError
from kvxfer_bench.verdict import mixed_rounds
from kvxfer_vllm.demo.model import SHAPES, Shape, write_model, write_shape
from kvxfer_vllm.demo.servers import Server, ServerError, await_ready, ended_by_sigterm, ended_together

START_S = 600.0
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class ServerPair:
    """Two servers between which KV moves."""

    prefill: Server
    decode: Server


Pair = TypeVar("Pair", bound=ServerPair)


@dataclass(frozen=True)
class Starter:
    """Starts servers of one model.

    Attributes:
        named: What ``--model`` says.
        gpus: Those of the prefill and of the decode servers; one for both, or none.
        flags: Of each server.
        begun: The servers so far.
        kind: What they are.
    """

    named: str
    model: Path
    logs: Path
    gpus: Sequence[str]
    flags: Sequence[str]
    begun: list[Server]
    kind: type[Server] = Server

    def start(
        self,
        name: str,
        role: str,
        transfer: Mapping[str, Any] | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> Server:
        """Start one, on the GPU of its role, which is ``prefill`` or ``decode``."""
        on = {"CUDA_VISIBLE_DEVICES": self.gpus[0 if role == "prefill" else -1]} if self.gpus else {}
        server = self.kind(name, self.model, self.logs, transfer, [*flags, *self.flags], {**(env or {}), **on}, port)
        self.begun.append(server)
        return server

    def tell(self, row: Mapping[str, Any]) -> None:
        """Print a result as a line of JSON."""
        typer.echo(json.dumps({"model": self.named, "gpus": self.gpus, **row}))


def shape_of(model: str) -> Shape:
    """Return the shape that ``--model`` names.

    Raises:
        ConfigError: There is none of that name.
    """
    if model not in SHAPES:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(SHAPES)}")
    return SHAPES[model]


@contextmanager
def starting(
    model: str,
    usual: Sequence[str] = (),
    gpus: str = "",
    flags: str = "",
    keep_logs: Path | None = None,
    kind: type[Server] = Server,
) -> Iterator[Starter]:
    """Have what starts servers of a model: a shape, with weights that are made up unless it is ``tiny``, or a folder.

    The servers are ended with the block, and logs go with it unless they are kept. Of the flags, ``flags``, one text, come last.
    """
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder, ended_together() as begun:
        logs, where, dummy = keep_logs or Path(folder), Path(folder) / "model", list[str]()
        logs.mkdir(parents=True, exist_ok=True)
        if model == "tiny":
            write_model(where)
        elif model in SHAPES:
            write_shape(where, SHAPES[model])
            dummy = ["--load-format", "dummy"]
        else:
            where = Path(model)
        on = [gpu.strip() for gpu in gpus.split(",") if gpu.strip()]
        yield Starter(model, where, logs, on, [*dummy, *usual, *flags.split()], begun, kind)


class PairTurns(Generic[Pair]):
    """Asks pairs of servers by name, in turns. A pair of which a server fails is left out from then on, which ``failed`` says.

    Args:
        pairs: The pairs.
        tell: Called with each result.
        say: Called with what is being done.
    """

    def __init__(self, pairs: Mapping[str, Pair], tell: Tell, say: Say = silent) -> None:
        self.pairs, self.tell, self.say = dict(pairs), tell, say
        self.failed = False

    def ready(self) -> None:
        """Wait until all servers answer."""

        def answers(server: Server) -> None:
            self.say(f"{server.name} answers")

        self.each("starting", lambda name, pair: await_ready((pair.prefill, pair.decode), START_S, answers))

    def each(self, what: str, do: Callable[[str, Pair], None]) -> None:
        """Do something with each pair."""
        for name in list(self.pairs):
            self.say(f"{what}: {name}")
            self._try(what, name, do)

    def rounds(self, what: str, rounds: int, do: Callable[[str, Pair, int], None]) -> None:
        """Do something with each pair in each round; it is told the round's number."""
        for number, name in mixed_rounds(what, self.pairs.keys(), rounds, self.say):
            self._try(what, name, lambda name, pair: do(name, pair, number))  # noqa: B023

    def _try(self, what: str, name: str, do: Callable[[str, Pair], None]) -> None:
        try:
            do(name, self.pairs[name])
        except (ServerError, OSError) as error:
            self.failed = True
            del self.pairs[name]
            self.tell({"backend": name, "error": f"{what}: {error}"})
