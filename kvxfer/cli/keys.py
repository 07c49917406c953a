"""`kvxfer keys`: makes keys, and edits the files of those that engines present and accept."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.errors import ConfigError
from kvxfer.keyfile import KeyFile
from kvxfer.keyring import read_keys, write_keys
from kvxfer.security import make_key


class Action(StrEnum):
    """What to do with a key file."""

    NEW = "new"
    SHOW = "show"
    PUBLIC = "public"
    ACCEPT = "accept"
    FIRST = "first"
    DROP = "drop"


def keys(
    file: Annotated[Path, typer.Argument(help="The key file.")],
    action: Annotated[
        Action,
        typer.Argument(
            help="new: make the file, with a new key. show: list its keys. public: print its first key without the private part, for "
            "engines that are to accept it. accept: add the keys of another file at the end. first: present this key from now "
            "on. drop: take this key out."
        ),
    ] = Action.NEW,
    which: Annotated[
        str | None,
        typer.Argument(
            help="With accept: the other file. With first and drop: the key, by its name as show prints it."
        ),
    ] = None,
) -> None:
    """Make the key that lets the engines of one deployment talk to each other, replace it while they run, or revoke it.

    Copy the file to every engine of the deployment and set key_file to its path. Keep it secret: anybody who has it can connect. An
    engine presents the first private key of its file, and accepts every key in it. It reads the file again when that changes.
    """
    if (which is None) != (action in (Action.NEW, Action.SHOW, Action.PUBLIC)):
        needs = "takes nothing after it" if which is not None else "needs a file or the name of a key after it"
        raise ConfigError(f"{action} {needs}; see `kvxfer keys --help`")
    if action is Action.NEW:
        make_key(file)
        typer.echo(f'Wrote a new key to {file}. Copy it to every engine and set "key_file" to its path.')
        return
    known, word = read_keys(file), which or ""
    match action:
        case Action.SHOW:
            _show(known)
        case Action.PUBLIC:
            if known.own is None:
                raise ConfigError(f"{str(file)!r} holds no private key")
            typer.echo(known.own.certificate, nl=False)
        case Action.ACCEPT:
            more = read_keys(Path(word))
            if not more.keys:
                raise ConfigError(
                    f"{word!r} holds no key: name a file that `kvxfer keys FILE public` or `kvxfer keys FILE` has written"
                )
            write_keys(file, known.accept(more))
        case Action.FIRST:
            write_keys(file, known.first(known.find(word)))
        case Action.DROP:
            write_keys(file, known.drop(known.find(word)))
    if action in (Action.ACCEPT, Action.FIRST, Action.DROP):
        _show(read_keys(file))


def _show(known: KeyFile) -> None:
    for key in known.keys:
        role = "presented" if key is known.own else "accepted"
        kind = "private key" if key.secret else "certificate only"
        typer.echo(f"{key.id}  {role}, {kind}")
