"""`kvxfer bench`: the benchmarks, one command each, whichever distributions bring them."""

from importlib.metadata import PackageNotFoundError, distribution

import typer
from rich.markup import escape

from kvxfer.cli.installed import InstalledCommands

_MORE = "in a checkout, pip install ./benchmarks brings the benchmarks"


def _more() -> str | None:
    """Return how to get the benchmarks of this repository, or `None` if they are installed."""
    try:
        distribution("kvxfer-bench")
    except PackageNotFoundError:
        return _MORE
    return None


class _Benchmarks(InstalledCommands):
    """Says what to install when a benchmark is not found."""

    entry_points = "kvxfer.benchmarks"

    def lacking(self, name: str) -> str | None:
        more = _more()
        return more and f"benchmark {name!r} is not installed; {more}"


bench = typer.Typer(
    cls=_Benchmarks,
    no_args_is_help=True,
    help="Measure what this machine and a back end can do.",
    epilog=escape(_more() or ""),
)


@bench.callback()
def _common() -> None:
    pass
