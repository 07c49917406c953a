"""``kvxfer bench distance``: a back end over a simulated link with long latency and packet loss, in turns with its library."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvxfer.errors import ConfigError
from kvxfer.settings import json_object
from kvxfer_bench import turns
from kvxfer_bench.slow_link import HERE, THERE, SlowLink, apart
from kvxfer_bench.transfer.shapes import MODELS

__all__ = ["distance", "measure"]


def measure(
    backend: str, options: list[dict[str, Any]], link: SlowLink, model: str, tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Do what ``turns.measure`` does over such a link, with each set of options and the library with the same options.

    Sessions are left out, because their control connections would not go over the link.

    Call this in a network namespace of its own, for a back end with options ``listen`` and ``advertise``.
    """
    with link.up():
        for chosen in options:
            placed = {**chosen, "listen": HERE, "advertise": THERE}
            yield from turns.measure(backend, [placed], "cpu", model, tokens, rounds, 64 << 20, sessions=False)


def distance(
    options: Annotated[list[str], typer.Argument(help="backend_options of each variant to measure, as JSON objects.")],
    backend: Annotated[str, typer.Option(help="Back end to measure.")] = "tcp",
    round_trip_ms: Annotated[float, typer.Option(min=0.0, help="Round-trip time of the link, in milliseconds.")] = 10.0,
    loss: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of packets that are lost, from 0 to 1.")] = 0.001,
    mbit_per_s: Annotated[float, typer.Option(min=1.0, help="Rate of the link, in Mbit/s.")] = 400.0,
    congestion: Annotated[str | None, typer.Option(help="TCP congestion control. [default: the host's own]")] = None,
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the request, in tokens.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 15,
) -> None:
    """Move a request over a simulated link with long latency and packet loss, in turns with the back end's library.

    Prints one JSON object per line. The link is a tun device in a network namespace of its own, which needs Linux,
    /dev/net/tun, and a host that permits user namespaces.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(MODELS)}")
    link = round_trip_ms / 1e3, loss, mbit_per_s * 1e6 / 8, congestion
    told = json.dumps(
        (backend, [json_object(each, "each of OPTIONS") for each in options], link, model, tokens, rounds)
    )
    raise typer.Exit(apart(__name__, told))


if __name__ == "__main__":
    _backend, _options, _link, *_rest = json.loads(sys.argv[1])
    for _row in measure(_backend, _options, SlowLink(*_link), *_rest):
        print(json.dumps(_row), flush=True)
