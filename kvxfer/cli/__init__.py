"""The program `kvxfer`. What it needs beyond the core is in the extra `cli`, so that engines need not install it."""

from __future__ import annotations

import sys

__all__ = ["run"]


def run() -> None:
    """Run the program, or say how to install what is missing."""
    try:
        from kvxfer.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"kvxfer: the program needs {error.name}, which is not installed; pip install 'kvxfer[cli]'")
    app()
