"""`kvxfer bench`: the benchmarks, one command each, including those of back ends and connectors."""

import typer

from kvxfer.cli.installed import add_installed

GROUP = "kvxfer.benchmarks"

bench = typer.Typer(no_args_is_help=True, help="Measure what this machine and a back end can do.")
add_installed(bench, GROUP)
