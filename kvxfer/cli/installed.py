"""Adds commands that installed distributions declare by entry point, to the program and to `kvxfer bench`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import typer

from kvxfer.errors import why_not_loaded

__all__ = ["add_installed", "help_of"]

_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_installed(program: typer.Typer, group: str) -> None:
    """Add all commands of an entry-point group. A command that cannot be imported says so when it is called.

    A command is a function that `typer.Typer.command` accepts, which may have an attribute `context_settings`, or a `typer.Typer`.
    """
    installed = {point.name: point for point in entry_points(group=group)}
    for name in sorted(installed):
        try:
            command = installed[name].load()
        except Exception as error:  # whatever its module does when it is imported costs no other command anything
            _add_unavailable(program, name, f"cannot be loaded from {installed[name].value}: {why_not_loaded(error)}")
        else:
            if isinstance(command, typer.Typer):
                program.add_typer(command, name=name)
            else:
                settings = getattr(command, "context_settings", None)
                program.command(name, help=help_of(command), context_settings=settings)(command)


def help_of(command: Callable[..., Any]) -> str:
    """Return a command's docstring with each paragraph on one line: typer fits only the first to the terminal."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


def _add_unavailable(program: typer.Typer, name: str, reason: str) -> None:
    @program.command(name, help=f"({reason})", context_settings=_ANY_ARGUMENTS)
    def unavailable() -> None:
        typer.echo(f"kvxfer: {name} {reason}", err=True)
        raise typer.Exit(1)
