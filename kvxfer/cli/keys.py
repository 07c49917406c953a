"""`kvxfer keys`: the key that the engines of a deployment share."""

from pathlib import Path
from typing import Annotated

import typer

from kvxfer.security import make_key


def keys(file: Annotated[Path, typer.Argument(help="File to write the key to; it must not exist yet.")]) -> None:
    """Make the key that lets the engines of one deployment talk to each other.

    Copy the file to every engine of the deployment and set key_file to its path. Keep it secret: whoever has it can connect.
    """
    make_key(file)
    typer.echo(f'Wrote a new key to {file}. Copy it to every engine and set "key_file" to its path.')
