"""The program `kvxfer`. Its commands are entry points of the group `kvxfer.commands`, so that whatever is
installed beside the core brings its own (`demo` comes with kvxfer-vllm); the core needs to know none of them.

A command is a function as `typer.Typer.command` takes it, or a `typer.Typer` with commands of its own. All are
imported whenever the program starts: one that needs something heavy imports it when it is called.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvxfer
from kvxfer.errors import KvxferError

GROUP = "kvxfer.commands"

_ELSEWHERE = {"demo": "pip install 'kvxfer[vllm]'"}
"""Commands of distributions that are published beside the core, and how to get them."""

_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Program(TyperGroup):
    """Tells errors that kvxfer raises on purpose without a traceback, from whatever command they come."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvxferError as error:
            typer.echo(f"kvxfer: {error}", err=True)
            raise typer.Exit(1) from None


def build() -> typer.Typer:
    """The program with all commands that are installed. One that cannot be imported says so when called."""
    program = typer.Typer(
        name="kvxfer",
        cls=_Program,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @program.callback()
    def common(
        version: Annotated[
            bool, typer.Option("--version", help="Print it and exit.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Moves the KV cache of LLM requests between prefill and decode engines, over any transport."""

    installed = {point.name: point for point in entry_points(group=GROUP)}
    for name in sorted(installed.keys() | _ELSEWHERE):
        if name not in installed:
            _add_unavailable(program, name, f"not installed: {_ELSEWHERE[name]}")
            continue
        try:
            command = installed[name].load()
        except (ImportError, AttributeError) as error:
            _add_unavailable(program, name, f"not to be loaded from {installed[name].value}: {error}")
        else:
            if isinstance(command, typer.Typer):
                program.add_typer(command, name=name)
            else:
                program.command(name)(command)
    return program


def _add_unavailable(program: typer.Typer, name: str, reason: str) -> None:
    @program.command(name, help=f"({reason})", context_settings=_ANY_ARGUMENTS)
    def unavailable() -> None:
        typer.echo(f"kvxfer: {name} is {reason}", err=True)
        raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvxfer.__version__)
        raise typer.Exit()


app = build()
