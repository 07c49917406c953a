"""The program `kvxfer`. What it needs beyond the core is in the extra `cli`, so that engines need not install it."""

from __future__ import annotations

import sys

import kvxfer

__all__ = ["run"]


def run(name: str | None = None) -> None:
    """Run the program, or say how to install what is missing. The version is printed without the second that importing it takes."""
    if sys.argv[1:] == ["--version"]:
        print(kvxfer.__version__)
        return
    try:
        from kvxfer.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"kvxfer: the program needs {error.name}, which is not installed; in a checkout: pip install '.[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name=name)
