"""`kvxfer bench`: the benchmarks, one command each, those that back ends and connectors bring included."""

import typer

from kvxfer.cli.installed import add_installed

GROUP = "kvxfer.benchmarks"

bench = typer.Typer(no_args_is_help=True, help="Measure what this machine and a back end can do.")
add_installed(bench, GROUP)
