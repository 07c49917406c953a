"""The program `kvxfer`.

Its commands are entry points of the group `kvxfer.commands`, so that whatever is installed beside the core brings its
own and the core knows none of them. A command is a function that
`typer.Typer.command` accepts, or a `typer.Typer` with commands of its own. The module of a command is imported when it is called
or listed.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

import kvxfer
from kvxfer.cli.installed import InstalledCommands
from kvxfer.errors import KvxferError

_ELSEWHERE = {"conformance": "./testing", "demo": "'./connectors/vllm[demo]' beside a vLLM"}
"""What brings commands that are not the core's."""


class _Program(InstalledCommands):
    """Reports the errors that kvxfer raises on purpose without a traceback, whichever command they come from."""

    entry_points = "kvxfer.commands"

    def lacking(self, name: str) -> str | None:
        return f"{name} is not installed; in a checkout: pip install {_ELSEWHERE[name]}" if name in _ELSEWHERE else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvxferError as error:
            typer.echo(f"kvxfer: {error}", err=True)
            raise typer.Exit(1) from None


def build() -> typer.Typer:
    """Build the program with all installed commands. A command that cannot be imported says so when it is called."""
    program = typer.Typer(name="kvxfer", cls=_Program, no_args_is_help=True, pretty_exceptions_enable=False)

    @program.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Move the KV cache of LLM requests between prefill and decode engines, over any transport."""

    return program


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvxfer.__version__)
        raise typer.Exit()


app = build()
