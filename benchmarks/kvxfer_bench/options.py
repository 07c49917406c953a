"""Options that several benchmarks have, and what their texts mean."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli.doctor import read_settings
from kvxfer.errors import ConfigError
from kvxfer.transport import load
from kvxfer.transport.auto import AUTO

STOCK = ("NixlConnector", "NixlPushConnector")
"""Connectors of vLLM's own that are measured beside kvxfer: the decode server reads, or the prefill server writes."""


def known_here(backend: str) -> str:
    """Return the name of a back end, before anything is started with it.

    Raises:
        ConfigError: None of that name is installed here, and it is not ``auto``.
    """
    if backend != AUTO:
        load(backend)
    return backend


Backend = Annotated[str, typer.Option(help="Back end that moves the KV.", callback=known_here)]
BackendOptions = Annotated[str, typer.Option(help="Options of the back end (backend_options), as a JSON object.")]
Device = Annotated[str, typer.Option(help="Memory of the caches: cpu or cuda.")]
Flags = Annotated[str, typer.Option(help="Further flags of the servers, separated by spaces.")]
Gpus = Annotated[
    str,
    typer.Option(help="GPUs of the prefill and the decode servers, such as 0,1, or 0 for both; empty for processors."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
KeepLogs = Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")]
Minutes = Annotated[float, typer.Option(help="How long to run, in minutes.", min=0.1)]
Requests = Annotated[int, typer.Option(min=20, help="Number of requests that clients send.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that count, after one that warms up.")]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]


def parsed(compared: str, others: Collection[str] = ()) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the settings of ``NAME`` or ``NAME:{"setting": value}``.

    ``others``: names that are no back end's; what settings they have is not known here.

    Raises:
        ConfigError: The settings are no JSON object or none of kvxfer's, or there is no such back end here.
    """
    name, colon, given = compared.partition(":")
    try:
        settings = json.loads(given) if colon else {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"after {name!r} and a colon, settings must be a JSON object, not {given!r}")
    if name not in others:
        read_settings(json.dumps({"backend": known_here(name), **settings}))
    return name, settings
