"""``kvxfer bench distance``: a back end over a link that is long and loses packets, in turns with its library."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvxfer.bench import turns
from kvxfer.bench.shapes import MODELS
from kvxfer.bench.slow_link import HERE, THERE, SlowLink, apart
from kvxfer.errors import ConfigError
from kvxfer.settings import json_object

__all__ = ["distance", "measure"]


def measure(
    backend: str, options: list[dict[str, Any]], link: SlowLink, model: str, tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Do what ``turns.measure`` does over such a link, with each set of options beside the library with the same options.

    Without sessions: their control connections would not go over it.

    To be called in a network namespace of its own, by a back end with options ``listen`` and ``advertise``.
    """
    with link.up():
        for chosen in options:
            placed = {**chosen, "listen": HERE, "advertise": THERE}
            yield from turns.measure(backend, [placed], "cpu", model, tokens, rounds, 64 << 20, sessions=False)


def distance(
    options: Annotated[list[str], typer.Argument(help="backend_options, a JSON object for each variant.")],
    backend: Annotated[str, typer.Option(help="Name of a back end.")] = "tcp",
    round_trip_ms: Annotated[float, typer.Option(min=0.0, help="From one end to the other and back.")] = 10.0,
    loss: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of packets that are lost.")] = 0.001,
    mbit_per_s: Annotated[float, typer.Option(min=1.0, help="Rate of the link.")] = 400.0,
    congestion: Annotated[str | None, typer.Option(help="TCP's congestion control; the host's own by default.")] = None,
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the request.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median counts.")] = 15,
) -> None:
    """Move a request over a link that is long and loses packets, in turns with the library; a JSON object a line.

    The link is made of a tun device in a network namespace of its own: Linux, /dev/net/tun, and a host that permits
    user namespaces.
    """
    if model not in MODELS:
        raise ConfigError(f"there is no model {model!r}; there are {', '.join(MODELS)}")
    link = round_trip_ms / 1e3, loss, mbit_per_s * 1e6 / 8, congestion
    told = json.dumps(
        (backend, [json_object(each, "each of OPTIONS") for each in options], link, model, tokens, rounds)
    )
    raise typer.Exit(apart(__name__, told))


if __name__ == "__main__":
    _backend, _options, _link, *_rest = json.loads(sys.argv[1])
    for _row in measure(_backend, _options, SlowLink(*_link), *_rest):
        print(json.dumps(_row), flush=True)
