"""Read and check the settings that a user wrote: the configuration, and the options of every back end.

For an unknown name the error suggests the nearest known one; for a wrong value it says what is expected. Authors of back
ends use this too: ``read(Options, options, "option {!r} of back end 'mine'")``.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec import Meta

from kvxfer.errors import ConfigError
from kvxfer.identity import IdentityError, canonical_host

__all__ = [
    "AUTO_ADDRESS",
    "address_of",
    "told_address",
    "WILDCARDS",
    "advice",
    "bare",
    "check_dialable",
    "everywhere",
    "expected",
    "hold",
    "json_object",
    "loopback",
    "named",
    "near",
    "own_address",
    "port_range",
    "read",
    "read_file",
    "unmapped",
]

T = TypeVar("T", bound=msgspec.Struct)

MAX_BYTES = 4 << 20
"""The most bytes of a file that a user names: thousands of keys."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
WILDCARDS = frozenset({"0.0.0.0", "::", "*"})
AUTO_ADDRESS = "auto"
"""Stands for the address that each process finds for itself (``own_address``)."""
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Documentation addresses (RFC 5737, RFC 3849), which are never local: a route to them starts at this host's own address."""


def read(kind: type[T], values: Mapping[str, Any], naming: str) -> T:
    """Read settings as they come out of JSON, YAML or an engine's own configuration.

    Args:
        kind: A struct whose fields have defaults; their types say what is allowed.
        values: The settings, by name.
        naming: How messages name a setting, with ``{!r}`` where its name goes.

    Raises:
        ConfigError: ``values`` is not a mapping, a setting is unknown (the message names the nearest known one), or a value
            has the wrong type or range (the message names setting, value and what is expected).
    """
    types = _types(kind)
    taken = named(kind, values, naming).items()
    return kind(**{key: _taken(value, types[key], naming.format(key)) for key, value in taken})


def named(kind: type[T], values: Mapping[str, Any], naming: str) -> Mapping[str, Any]:
    """Return settings by name, as they are, if ``kind`` has a field for each; for a struct that checks their values itself (``hold``).

    Raises:
        ConfigError: ``values`` is not a mapping, or a setting is unknown (the message names the nearest known one).
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"settings must be a mapping by name, not a {type(values).__name__}")
    types = _types(kind)
    for key in values:
        if key not in types:
            raise ConfigError(f"unknown {naming.format(key)}: {advice(key, types)}")
    return values


def json_object(text: str, naming: str, or_file: bool = False) -> dict[str, Any]:
    """Read a JSON object, or with ``or_file`` the path of a file with one; ``naming`` is what messages call it.

    Raises:
        ConfigError: There is no JSON object, or a name is twice in one.
    """
    is_no = "is neither a JSON object nor the path of a file with one" if or_file else "is not JSON"
    try:
        if or_file and not text.lstrip().startswith("{"):
            text = read_file(text)[0].decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=partial(_each_once, naming))
    except RecursionError:
        raise ConfigError(f"{naming} is nested too deeply") from None
    except (OSError, ValueError) as error:  # so are numbers of thousands of digits
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{naming} {is_no}: {why}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{naming} must be a JSON object, not a {type(value).__name__}")
    return value


def read_file(path: str | Path, most: int = MAX_BYTES) -> tuple[bytes, os.stat_result]:
    """Return what is in a file that a user names, and its status. Waits for no pipe or device.

    Raises:
        OSError: It cannot be read, is no regular file, or has more than ``most`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB")
    return data, status


def _each_once(naming: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for key, _ in pairs if len(found) < len(pairs) else ():
        if [name for name, _ in pairs].count(key) > 1:
            raise ConfigError(f"{naming} is ambiguous: {key!r:.100} is there twice; take one of them out")
    return found


def hold(settings: msgspec.Struct, naming: str) -> None:
    """Check the fields of a settings struct against their types; for its ``__post_init__``, so that no path avoids the check.

    Raises:
        ConfigError: A value has the wrong type or range.
    """
    for name, type_ in _types(type(settings)).items():
        value = getattr(settings, name)
        taken = _taken(value, type_, naming.format(name))
        if taken is not value:
            msgspec.structs.force_setattr(settings, name, taken)


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _taken(value: Any, type_: Any, what: str) -> Any:
    """Return a setting's value converted to its field's type; numpy's numbers count as plain ones."""
    plain = value.item() if isinstance(value, np.generic) else value
    try:
        return msgspec.convert(plain, type_)
    except msgspec.ValidationError:
        raise ConfigError(f"{what} cannot be {value!r:.200}: expected {expected(type_)}") from None


def check_dialable(listen: str, advertise: str | None, naming: str) -> None:
    """Refuse settings that would tell peers to dial what they cannot, such as the wildcard ``0.0.0.0``.

    Raises:
        ConfigError: ``advertise``, or ``listen`` if that is not set, is a wildcard, or no address or host name as peers know them.
    """
    told, setting = (listen, "listen") if advertise is None else (advertise, "advertise")
    if everywhere(told):
        raise ConfigError(
            f"{naming.format(setting)} is {told!r}, which peers cannot dial; "
            "set 'advertise' to this host's name or address, or to 'auto'"
        )
    try:
        canonical_host(told)
    except IdentityError as e:
        raise ConfigError(
            f"{naming.format(setting)}: {e}; peers could not dial it: set 'advertise' to what they can"
        ) from None


def address_of(host: str, like: str = "") -> str:
    """Return the address that a host is named by; of a name that leads to several, one of the family of the address ``like``.

    Raises:
        OSError: The name leads nowhere.
    """
    try:
        found = [
            str(where[0]).partition("%")[0]
            for *_, where in socket.getaddrinfo(bare(host), None, type=socket.SOCK_STREAM)
        ]
    except UnicodeError as e:
        raise OSError(str(e)) from None
    return min(found, key=lambda address: (":" in address) != (":" in bare(like)))


def told_address(listen: str, advertise: str | None, naming: str) -> str:
    """Return the address that peers are told. A name is looked up here, where it is said, and never by peers.

    Raises:
        ConfigError: The name leads nowhere.
    """
    told = bare(advertise or listen)
    try:
        return bare(address_of(told, listen))
    except OSError as e:
        setting, instead = ("advertise", "an address, or to 'auto'") if advertise else ("listen", "an address")
        raise ConfigError(
            f"{naming.format(setting)} is {told!r}, which this host cannot resolve: {e}; set it to {instead}"
        ) from None


def own_address() -> str:
    """Return the address from which this host reaches others, IPv4 if it has one. Sends nothing.

    Raises:
        ConfigError: No route leads out of this host.
    """
    for family, target in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((target, 9))
            return str(s.getsockname()[0])
    raise ConfigError("this host's own address cannot be found, because no route leads out of it: set 'advertise'")


def port_range(text: str | None, what: str) -> range:
    """Return the ports of ``FIRST-LAST``; for ``None`` port 0 alone, which stands for any free one.

    Raises:
        ConfigError: It is no such range.
    """
    if text is None:
        return range(1)
    first, dash, last = text.partition("-")
    try:
        out = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        out = range(0)
    if not out or out[0] < 1 or out[-1] > 65535:
        raise ConfigError(f"{what} cannot be {text!r}: expected ports as in '20000-20099'")
    return out


def bare(address: str) -> str:
    """Return an IP address in its one written form, without brackets; anything else, such as a host name, unchanged."""
    try:
        return str(ipaddress.ip_address(address.removeprefix("[").removesuffix("]")))
    except ValueError:
        return address


def everywhere(address: str) -> bool:
    """Return whether an address is a wildcard: all addresses of this host."""
    try:
        return unmapped(ipaddress.ip_address(bare(address))).is_unspecified
    except ValueError:
        return address in WILDCARDS


def loopback(address: str) -> bool:
    """Return whether an address can be reached from this host only. Of names, only ``localhost`` counts as such."""
    try:
        return unmapped(ipaddress.ip_address(bare(address).partition("%")[0])).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def unmapped(address: IpAddress) -> IpAddress:
    """Return the IPv4 address inside an IPv4-mapped IPv6 one; any other address unchanged."""
    return getattr(address, "ipv4_mapped", None) or address


def advice(key: object, known: Iterable[str]) -> str:
    """Return advice about an unknown name: the nearest known name, or all of them."""
    names = list(known)
    return near(key, names) or f"there are {', '.join(names)}"


def near(key: object, known: Iterable[str]) -> str | None:
    """Return a question that suggests the known name nearest to ``key``; ``None`` if none is near."""
    from difflib import get_close_matches  # imported here because only mistakes need it

    found = get_close_matches(str(key), list(known), n=1)
    return f"did you mean {found[0]!r}?" if found else None


_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "null"}


def expected(type_: Any) -> str:
    """Say in words what a setting's type takes, with its unit and its limits."""
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is Annotated:
        metas = [meta for meta in arguments[1:] if isinstance(meta, Meta)]
        return expected(arguments[0]) + "".join(_limits(meta, arguments[0]) for meta in metas)
    if origin in (Union, UnionType):
        rest = " or ".join(expected(one) for one in arguments if one is not type(None))
        return f"null, or {rest}" if type(None) in arguments else rest
    if origin in (list, tuple, set, frozenset):
        return f"a list, each of its elements {expected(arguments[0])}"
    return "an object" if origin is dict or type_ is dict else _PLAIN.get(type_, "another type")


def _limits(meta: Meta, of: Any) -> str:
    unit = f" {meta.title}" if meta.title else ""
    least = next(
        (f"{word} {limit:g}" for word, limit in (("above", meta.gt), ("at least", meta.ge)) if limit is not None), None
    )
    most = next(
        (f"{word} {limit:g}" for word, limit in (("below", meta.lt), ("at most", meta.le)) if limit is not None), None
    )
    words = [text for text in (least, most) if text]
    if meta.min_length:
        words.append("not empty" if meta.min_length == 1 else f"of at least {meta.min_length}")
    if meta.max_length is not None:
        words.append(f"of at most {meta.max_length} {'characters' if of is str else 'elements'}")
    if meta.pattern is not None:
        words.append(meta.description or f"of the form {meta.pattern}")
    return (f" of{unit}" if unit else "") + (f", {' and '.join(words)}" if words else "")
