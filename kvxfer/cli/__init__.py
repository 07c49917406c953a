"""The program `kvxfer`. What it needs beside the core is the extra `cli`, so that engines do not carry it."""

from __future__ import annotations

import sys

__all__ = ["run"]


def run() -> None:
    """Run the program, or say how to install what it needs."""
    try:
        from kvxfer.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"kvxfer: the program needs {error.name}, which is not installed; pip install 'kvxfer[cli]'")
    app()
