"""The program `kvxfer`. Its commands are entry points of the group `kvxfer.commands`, so that whatever is
installed beside the core brings its own (`demo` comes with kvxfer-vllm); the core needs to know none of them.

A command is a function as `typer.Typer.command` takes it. All are imported whenever the program starts: one
that needs something heavy imports it when it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

import kvxfer
from kvxfer.errors import KvxferError

GROUP = "kvxfer.commands"


def build() -> typer.Typer:
    """The program with all commands that are installed. One that cannot be imported says so when called."""
    program = typer.Typer(
        name="kvxfer",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        epilog="Connectors and back ends bring more commands: demo comes with kvxfer-vllm.",
    )

    @program.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", help="Print it and exit.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Moves the KV cache of LLM requests between prefill and decode engines, over any transport."""

    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        program.command(point.name)(_load(point))
    return program


def _load(point: EntryPoint) -> Callable[..., Any]:
    try:
        command: Callable[..., Any] = point.load()
    except (ImportError, AttributeError) as error:
        reason = f"{point.name} ({point.value}) cannot be loaded: {error}"

        def broken() -> None:
            typer.echo(f"kvxfer: {reason}", err=True)
            raise typer.Exit(1)

        broken.__doc__ = f"(unavailable: {reason})"
        return broken

    @functools.wraps(command)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except KvxferError as error:
            typer.echo(f"kvxfer: {error}", err=True)
            raise typer.Exit(1) from None

    return reporting


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvxfer.__version__)
        raise typer.Exit()


app = build()
