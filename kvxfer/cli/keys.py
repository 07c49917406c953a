"""`kvxfer keys`: the key that the engines of a deployment share."""

from pathlib import Path
from typing import Annotated

import typer

from kvxfer.security import make_key


def keys(file: Annotated[Path, typer.Argument(help="Where to write the key; must not exist yet.")]) -> None:
    """Make a key. Give the file to all engines that shall talk to each other, as setting key_file, and to nobody else."""
    make_key(file)
    typer.echo(f'{file}: a new key. Copy it to every engine and set "key_file" to its path.')
