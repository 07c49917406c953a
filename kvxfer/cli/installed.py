"""Commands that installed distributions declare by entry point, for the program and for `kvxfer bench`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from kvxfer.errors import why_not_loaded

_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


class InstalledCommands(TyperGroup):
    """All commands of an entry-point group. Each is imported when it is called or listed, and a broken one then says so.

    A command is a function that `typer.Typer.command` accepts, which may have an attribute `context_settings`, or a `typer.Typer`.
    """

    entry_points: ClassVar[str]

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._installed()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and (point := self._installed().get(cmd_name)):
            self.commands[cmd_name] = _made(point)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (lack := self.lacking(args[0])) and self.get_command(ctx, args[0]) is None:
            ctx.fail(lack)
        return super().resolve_command(ctx, args)

    def lacking(self, name: str) -> str | None:
        """Return what to install for a command that is not there, if that is known."""
        return None

    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.entry_points)}


def _made(point: EntryPoint) -> Any:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    try:
        command = point.load()
    except Exception as error:  # whatever its module does when it is imported costs no other command anything
        reason = f"cannot be loaded from {point.value}: {why_not_loaded(error)}"
        alone.command(point.name, help=f"({reason})", context_settings=_ANY_ARGUMENTS)(_unavailable(point.name, reason))
    else:
        if isinstance(command, typer.Typer):
            made = typer.main.get_group(command)
            made.name = point.name
            return made
        settings = getattr(command, "context_settings", None)
        alone.command(point.name, help=help_of(command), context_settings=settings)(command)
    return typer.main.get_command(alone)


def help_of(command: Callable[..., Any]) -> str:
    """Return a command's docstring with each paragraph on one line: typer fits only the first to the terminal."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


def _unavailable(name: str, reason: str) -> Callable[[], None]:
    def unavailable() -> None:
        typer.echo(f"kvxfer: {name} {reason}", err=True)
        raise typer.Exit(1)

    return unavailable
