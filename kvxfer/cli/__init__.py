"""The program `kvxfer`. What it needs beyond the core is in the extra `cli`, so that engines need not install it."""

from __future__ import annotations

import errno
import os
import sys

import kvxfer

__all__ = ["run"]


def run(name: str | None = None) -> None:
    """Run the program, or say how to install what is missing."""
    try:
        try:
            _run(name)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        sys.exit(
            f"kvxfer: what standard output goes to, or a file, cannot be written: {error.strerror}; make room for it"
        )


def _run(name: str | None) -> None:
    """Run the program. The version is printed without the second that importing it takes."""
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
