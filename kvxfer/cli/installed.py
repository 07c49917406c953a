"""Commands that distributions bring, found by entry point: of the program and of `kvxfer bench`."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

__all__ = ["add_installed"]

_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_installed(program: typer.Typer, group: str) -> None:
    """Add all commands of an entry-point group. One that cannot be imported says so when it is called.

    A command is a function as `typer.Typer.command` takes it, which may have an attribute `context_settings`, or a `typer.Typer`.
    """
    installed = {point.name: point for point in entry_points(group=group)}
    for name in sorted(installed):
        try:
            command = installed[name].load()
        except (ImportError, AttributeError) as error:
            _add_unavailable(program, name, f"not to be loaded from {installed[name].value}: {error}")
        else:
            if isinstance(command, typer.Typer):
                program.add_typer(command, name=name)
            else:
                program.command(name, context_settings=getattr(command, "context_settings", None))(command)


def _add_unavailable(program: typer.Typer, name: str, reason: str) -> None:
    @program.command(name, help=f"({reason})", context_settings=_ANY_ARGUMENTS)
    def unavailable() -> None:
        typer.echo(f"kvxfer: {name} is {reason}", err=True)
        raise typer.Exit(1)
