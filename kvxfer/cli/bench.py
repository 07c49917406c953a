"""`kvxfer bench`: the benchmarks, one command each."""

import typer

from kvxfer.bench.plan import plan
from kvxfer.bench.soak import soak
from kvxfer.bench.transfer import transfer

bench = typer.Typer(no_args_is_help=True, help="Measure what this machine and a back end can do.")
bench.command("plan")(plan)
bench.command("soak")(soak)
bench.command("transfer")(transfer)
