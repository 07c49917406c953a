"""The program `kvxfer`.

Its commands are entry points of the group `kvxfer.commands`, so that whatever is installed beside the core brings its
own and the core knows none of them. A command is a function that
`typer.Typer.command` accepts, or a `typer.Typer` with commands of its own. All are imported whenever the program
starts, so a command that needs something heavy imports it when it is called.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvxfer
from kvxfer.cli.installed import add_installed
from kvxfer.errors import KvxferError

GROUP = "kvxfer.commands"


class _Program(TyperGroup):
    """Reports the errors that kvxfer raises on purpose without a traceback, whichever command they come from."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvxferError as error:
            typer.echo(f"kvxfer: {error}", err=True)
            raise typer.Exit(1) from None


def build() -> typer.Typer:
    """Build the program with all installed commands. A command that cannot be imported says so when it is called."""
    program = typer.Typer(
        name="kvxfer", cls=_Program, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )

    @program.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Move the KV cache of LLM requests between prefill and decode engines, over any transport."""

    add_installed(program, GROUP)
    return program


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvxfer.__version__)
        raise typer.Exit()


app = build()
