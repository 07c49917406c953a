"""`kvxfer demo`: the demo of one of the connectors that are installed, each with options of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.main import get_command

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.settings import json_object
from kvxfer.transport import registry
from kvxfer.transport.auto import AUTO

__all__ = ["Demo", "demo", "demo_settings"]

GROUP = "kvxfer.demos"

_ELSEWHERE = "pip install 'kvxfer-transformers[demo]', or 'kvxfer-vllm[demo]' beside a vLLM"


@dataclass(frozen=True)
class Demo:
    """A connector's demo: what an entry point of the group `kvxfer.demos` leads to, under the engine's name.

    Attributes:
        command: A function as `typer.Typer.command` takes it.
        lack: Says what it needs that is not installed, and how to get it; `None` if nothing.
        serves: Whether it starts servers. Such a demo comes first where no engine is asked for.
    """

    command: Callable[..., Any]
    lack: Callable[[], str | None]
    serves: bool = False


def demo_settings(backend: str, config: str) -> dict[str, Any]:
    """Return the settings of a demo's engines, checked here since they start later and elsewhere.

    ``config`` is a JSON object.

    Raises:
        ConfigError: A setting is wrong, or the back end does not work here.
    """
    settings = {"backend": backend, **json_object(config, "--config")}
    checked = Config.from_mapping(settings).backend
    if checked != AUTO:
        probe = registry.load(checked).probe()
        if not probe.usable:
            raise ConfigError(f"back end {settings['backend']!r} does not work here: {probe.reason}")
    return settings


def demo(
    context: typer.Context,
    engine: Annotated[
        str | None,
        typer.Option(help="Whose demo: that of a connector that is installed. By default one that starts servers."),
    ] = None,
) -> None:
    """Move KV from one process to another on this machine, and compare all tokens with a plain run's.

    Further options are those of the engine's demo: `kvxfer demo --engine NAME --help`.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_chosen(engine).command)
    code = get_command(app).main(context.args, prog_name="kvxfer demo", standalone_mode=False)
    if isinstance(code, int):
        raise typer.Exit(code)


# What is not known here is the chosen demo's, the wish for help included.
demo.context_settings = {  # type: ignore[attr-defined]
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _chosen(engine: str | None) -> Demo:
    """Return the demo of an engine; without one, of those that lack nothing, one that starts servers if there is one."""
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if not installed:
        raise ConfigError(f"no connector with a demo is installed: {_ELSEWHERE}")
    if engine is not None and engine not in installed:
        raise ConfigError(f"--engine {engine!r} has no demo here; there are those of {', '.join(sorted(installed))}")
    able, lacks = [], []
    for name in [engine] if engine is not None else sorted(installed):
        try:
            found: Demo = installed[name].load()
        except (ImportError, AttributeError) as error:
            lacks.append(f"{name}: not to be loaded from {installed[name].value}: {error}")
            continue
        lack = found.lack()
        if lack is None:
            able.append(found)
        else:
            lacks.append(f"{name}: {lack}")
    if not able:
        raise ConfigError("; ".join(lacks))
    return next((found for found in able if found.serves), able[0])
