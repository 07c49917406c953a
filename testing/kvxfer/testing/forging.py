"""Endpoints as a hostile peer would make them: a genuine one, of which some fields say something else.

Endpoints that ``EndpointBase`` makes are taken apart, altered field by field and in those combinations by which one process would pass
for another, and given a checksum that is right. Of endpoints of another form only bytes are altered.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

_CHECK_BYTES = 4
_ADDRESSES = 1 << 32
"""Integers from here on are taken for addresses, and smaller ones for numbers of processes, sizes and the like."""
_UP = "../" * 16
_LARGEST = (1 << 64) - 1
_MAX_LEAVES = 24
_FLIPS = 16
_PORTS = range(1024, 1 << 16)

Place = tuple[int, ...]


@dataclass(frozen=True)
class Bait:
    """What a forgery may name, and nobody has registered for its link."""

    address: int  # memory of the process under test, full of ``pattern``
    pattern: bytes  # sixteen bytes
    file: str  # the path of a file that is full of them as well
    pid: int  # the number of the process under test
    other: bytes  # a genuine endpoint of a third participant, for a link of its own


def forgeries(genuine: bytes, bait: Bait, kept: Collection[int] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield forgeries of an endpoint, which name the bait, each with words that tell what was altered.

    ``kept``: numbers of fields that are left as they are.
    """
    yield "all of it: another participant's", bait.other
    taken = _taken_apart(genuine)
    if taken is None:
        for at in range(0, len(genuine), max(1, len(genuine) // _FLIPS)):
            yield f"byte {at}", _inverted(genuine, at)
        return
    head, fields = taken
    others = _taken_apart(bait.other)
    leaves = [(path, leaf) for path, leaf in _leaves(fields) if path[0] not in kept]
    for path, leaf in leaves[:_MAX_LEAVES]:
        theirs = None if others is None else dict(_leaves(others[1])).get(path)
        for value in _values(leaf, theirs, bait):
            yield _altered(head, fields, path, value)
    for what, wanted in _guises(leaves, bait):
        yield what, _put_together(head, _with(fields, wanted))


def guesses(genuine: bytes, spare: bytes, kept: Collection[int] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield an endpoint as one would guess it who knows all but a byte of its secrets: of each the first one, and then the last.

    What differs between it and another endpoint of the same side (``spare``) is a secret of its link: bytes and large integers, or
    text if there are none.
    """
    taken, other = _taken_apart(genuine), _taken_apart(spare)
    if taken is None or other is None:
        differ = [i for i, (one, two) in enumerate(zip(genuine, spare, strict=False)) if one != two]
        for at in differ[:1] + differ[-1:]:
            yield f"byte {at}", _inverted(genuine, at)
        return
    theirs = dict(_leaves(other[1]))
    fresh = {path: leaf for path, leaf in _leaves(taken[1]) if path[0] not in kept and theirs.get(path, leaf) != leaf}
    sought = [path for path, leaf in fresh.items() if type(leaf) is bytes or (type(leaf) is int and leaf >= _ADDRESSES)]
    sought = sought or [path for path, leaf in fresh.items() if type(leaf) is str]
    if sought:
        where = ", ".join(".".join(map(str, path)) for path in sought)
        for which, at in (("first", 0), ("last", -1)):
            wrong = {path: _nearly(fresh[path], at) for path in sought}
            yield f"fields {where}: another {which} byte", _put_together(taken[0], _with(taken[1], wrong))


def ports(genuine: bytes, kept: Collection[int] = ()) -> list[Place]:
    """Return which fields of an endpoint name a port: an integer that may be one, or the end of an address."""
    _, fields = _taken_apart(genuine) or (b"", [])
    return [path for path, leaf in _leaves(fields) if path[0] not in kept and _redirected(leaf, 0) is not None]


def redirected(genuine: bytes, places: Collection[Place], port: int) -> bytes:
    """Return an endpoint that names another port in these fields."""
    taken = _taken_apart(genuine)
    if taken is None or not places:
        return genuine
    leaves = dict(_leaves(taken[1]))
    return _put_together(taken[0], _with(taken[1], {place: _redirected(leaves[place], port) for place in places}))


def _redirected(leaf: Any, port: int) -> Any:
    match leaf:
        case int() if leaf in _PORTS:
            return port
        case str() if ":" in leaf and leaf.rpartition(":")[2].isdecimal():
            return f"{leaf.rpartition(':')[0]}:{port}"
        case _:
            return None


def _nearly(secret: Any, at: int) -> Any:
    """Return a secret with another byte or character there; an integer, of which some bits may mean nothing, with other bits."""
    match secret:
        case bytes():
            return _inverted(secret, at) if secret else secret
        case str():
            characters = list(secret)
            characters[at] = "1" if secret[at] == "0" else "0"
            return "".join(characters)
        case _:
            return secret ^ (1 << secret.bit_length() - 1) - 1


def _inverted(data: bytes, at: int) -> bytes:
    altered = bytearray(data)
    altered[at] ^= 0xFF
    return bytes(altered)


def _values(leaf: Any, theirs: Any, bait: Bait) -> list[Any]:
    """Return what a field is replaced by."""
    found: list[Any] = [] if type(theirs) is not type(leaf) else [theirs]
    match leaf:
        case bool():
            found.append(not leaf)
        case int():
            found += [
                0,
                (leaf + 1) & _LARGEST,
                (2 * leaf) & _LARGEST,
                bait.pid,
                os.getppid(),
                bait.address,
                (1 << 62) - 1,
            ]
        case str():
            found += ["", bait.file, _UP + bait.file.lstrip("/"), leaf[:-1] + ("0" if leaf[-1:] != "0" else "1")]
        case bytes():
            found += [bytes(len(leaf)), (bait.pattern * (len(leaf) // len(bait.pattern) + 1))[: len(leaf)]]
    return [value for value in found if value != leaf]


def _guises(leaves: list[tuple[Place, Any]], bait: Bait) -> Iterator[tuple[str, dict[Place, Any]]]:
    """Yield fields by which a peer would pass for the process under test itself, with the bait as its memory."""
    places = {path: bait.address for path, leaf in leaves if type(leaf) is int and leaf >= _ADDRESSES}
    secrets = {
        path: (bait.pattern * (len(leaf) // len(bait.pattern) + 1))[: len(leaf)]
        for path, leaf in leaves
        if type(leaf) is bytes and len(path) > 1
    }
    numbers = [path for path, leaf in leaves if type(leaf) is int and leaf < _ADDRESSES and len(path) == 1]
    for more, what in (({}, "all addresses"), (secrets, "all addresses and inner secrets")):
        wanted = {**places, **more}
        if wanted:
            yield what, wanted
        for path in numbers:
            yield f"{what}, and field {path[0]} for the process", {**wanted, path: bait.pid}


def _altered(head: bytes, fields: list[Any], path: Place, value: Any) -> tuple[str, bytes]:
    where = ".".join(map(str, path))
    return f"field {where}: {_shown(value)}", _put_together(head, _with(fields, {path: value}))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _taken_apart(endpoint: bytes) -> tuple[bytes, list[Any]] | None:
    said = endpoint[:-_CHECK_BYTES]
    parts = said.split(b" ", 2)
    if len(parts) != 3 or zlib.crc32(said).to_bytes(_CHECK_BYTES) != endpoint[-_CHECK_BYTES:]:
        return None
    try:
        fields = msgspec.msgpack.decode(parts[2])
    except msgspec.MsgspecError:
        return None
    return (b" ".join([*parts[:2], b""]), fields) if isinstance(fields, list) else None


def _put_together(head: bytes, fields: list[Any]) -> bytes:
    said = head + msgspec.msgpack.encode(fields)
    return said + zlib.crc32(said).to_bytes(_CHECK_BYTES)


def _leaves(fields: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    if isinstance(fields, list):
        for i, field in enumerate(fields):
            yield from _leaves(field, (*path, i))
    elif path:
        yield path, fields


def _with(fields: Any, wanted: dict[Place, Any], path: Place = ()) -> Any:
    if isinstance(fields, list):
        return [_with(field, wanted, (*path, i)) for i, field in enumerate(fields)]
    return wanted.get(path, fields)
