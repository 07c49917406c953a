"""`kvxfer demo`: runs the demo of an installed connector, each of which has options of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.main import get_command

from kvxfer.cli.addresses import address_problems
from kvxfer.cli.installed import help_of
from kvxfer.config import Config
from kvxfer.errors import ConfigError, why_not_loaded
from kvxfer.settings import json_object
from kvxfer.transport import registry
from kvxfer.transport.auto import AUTO

__all__ = ["Demo", "demo", "demo_settings"]

GROUP = "kvxfer.demos"

_ELSEWHERE = "pip install 'kvxfer-transformers[demo]', or 'kvxfer-vllm[demo]' beside a vLLM"


@dataclass(frozen=True)
class Demo:
    """A connector's demo: the object of an entry point in the group `kvxfer.demos`, whose name is the engine's."""

    command: Callable[..., Any]  # a function that `typer.Typer.command` accepts
    # returns what is missing to run it and how to get that, or `None` if nothing is missing
    lack: Callable[[], str | None]
    serves: bool = False  # whether it starts servers. Such a demo is preferred when no engine is named


def demo_settings(backend: str, config: str) -> dict[str, Any]:
    """Return the settings of a demo's engines, checked now because the engines start later in processes of their own.

    ``config`` is a JSON object.

    Raises:
        ConfigError: A setting is wrong, or the back end or an address does not work here.
    """
    settings = {"backend": backend, **json_object(config, "--config")}
    checked = Config.from_mapping(settings).located()
    if problems := address_problems(checked):
        raise ConfigError("; ".join(problems))
    if checked.backend != AUTO:
        probe = registry.probed(registry.load(checked.backend))
        if not probe.usable:
            raise ConfigError(f"back end {settings['backend']!r} does not work here: {probe.reason}")
    return settings


def demo(
    context: typer.Context,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine whose demo to run; its connector must be installed. [default: one that starts servers]"
        ),
    ] = None,
) -> None:
    """Move KV between two processes on this machine, and compare every token with a plain run's.

    Each engine's demo has further options: `kvxfer demo --engine NAME --help`.
    """
    chosen = _chosen(engine).command
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=help_of(chosen), epilog=f"kvxfer demo --engine NAME runs another engine's demo: {_names()}.")(
        chosen
    )
    code = get_command(app).main(context.args, prog_name="kvxfer demo", standalone_mode=False)
    if isinstance(code, int):
        raise typer.Exit(code)


# Options that are unknown here belong to the chosen demo, and so does --help.
demo.context_settings = {  # type: ignore[attr-defined]
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _names() -> str:
    return ", ".join(sorted(point.name for point in entry_points(group=GROUP)))


def _chosen(engine: str | None) -> Demo:
    """Return the demo of an engine, or if none is named, one that can run here, preferably one that starts servers."""
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if not installed:
        raise ConfigError(f"no connector with a demo is installed: {_ELSEWHERE}")
    if engine is not None and engine not in installed:
        raise ConfigError(f"no demo of engine {engine!r} is installed; --engine can be {_names()}")
    able, lacks = [], []
    for name in [engine] if engine is not None else sorted(installed):
        try:
            found: Demo = installed[name].load()
        except Exception as error:  # whatever its module does when it is imported costs no other demo anything
            lacks.append(f"{name}: cannot be loaded from {installed[name].value}: {why_not_loaded(error)}")
            continue
        lack = found.lack()
        if lack is None:
            able.append(found)
        else:
            lacks.append(f"{name}: {lack}")
    if not able:
        raise ConfigError("; ".join(lacks))
    return next((found for found in able if found.serves), able[0])
