"""Settings that a user wrote, read in one way: the configuration's and the options of every back end.

An unknown name is answered with the nearest known one, a wrong value with what is expected. Whoever writes a back end
uses it too: ``read(Options, options, "option {!r} of back end 'mine'")``.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from kvxfer.errors import ConfigError

__all__ = [
    "AUTO_ADDRESS",
    "WILDCARDS",
    "advice",
    "check_dialable",
    "everywhere",
    "hold",
    "json_object",
    "loopback",
    "near",
    "own_address",
    "read",
    "unmapped",
]

T = TypeVar("T", bound=msgspec.Struct)

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
WILDCARDS = frozenset({"0.0.0.0", "::", "*"})
AUTO_ADDRESS = "auto"
"""In place of an address: the one that the process finds for itself."""
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses behind every router and of nobody (RFC 5737, RFC 3849): the way to them starts at an address of ours."""


def read(kind: type[T], values: Mapping[str, Any], naming: str) -> T:
    """Read settings as they come out of JSON, YAML or an engine's own configuration.

    Args:
        kind: A struct whose fields have defaults; their types say what is allowed.
        values: The settings, by name.
        naming: What messages call a setting, with ``{!r}`` where its name goes.

    Raises:
        ConfigError: A setting is unknown (the message names the nearest known one) or a value has the wrong type or
            range (the message names setting, value and what is expected).
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"settings must be a mapping by name, not a {type(values).__name__}")
    types = _types(kind)
    for key in values:
        if key not in types:
            raise ConfigError(f"unknown {naming.format(key)}: {advice(key, types)}")
    return kind(**{key: _taken(value, types[key], naming.format(key)) for key, value in values.items()})


def json_object(text: str, naming: str) -> dict[str, Any]:
    """Read a JSON object; ``naming`` is what messages call it.

    Raises:
        ConfigError: It is none.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{naming} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{naming} is no JSON object, but {text}")
    return value


def hold(settings: msgspec.Struct, naming: str) -> None:
    """Hold settings that were made without ``read`` to the types of their fields: for a ``__post_init__``.

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
    """Return a setting's value as its field has it; numbers of numpy are taken as the numbers they are."""
    plain = value.item() if isinstance(value, np.generic) else value
    try:
        return msgspec.convert(plain, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{what} cannot be {value!r}: {_expected(type_, error)}") from None


def check_dialable(listen: str, advertise: str | None, naming: str) -> None:
    """Refuse settings by which peers would be told to dial an address that stands for all addresses.

    Raises:
        ConfigError: ``listen`` is such an address, and ``advertise`` is not set.
    """
    if listen in WILDCARDS and advertise is None:
        raise ConfigError(
            f"{naming.format('listen')} is {listen!r}, which is no address that a peer could dial; "
            "set 'advertise' to this host's name or address, or to 'auto'"
        )


def own_address() -> str:
    """Return the address from which this host reaches others: of version 4 if it has one. Nothing is sent.

    Raises:
        ConfigError: No way leads out of this host.
    """
    for family, target in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((target, 9))
            return str(s.getsockname()[0])
    raise ConfigError("this host's own address cannot be found, since no route leads out of it: set 'advertise'")


def everywhere(address: str) -> bool:
    """Return whether an address stands for all addresses of this host."""
    return address.strip("[]") in WILDCARDS


def loopback(address: str) -> bool:
    """Return whether nobody outside this host reaches an address. Names other than ``localhost`` count as reachable."""
    plain = address.strip("[]").lower()
    try:
        return unmapped(ipaddress.ip_address(plain.partition("%")[0])).is_loopback
    except ValueError:
        return plain == "localhost"


def unmapped(address: IpAddress) -> IpAddress:
    """Return an address, as one of IPv4 if it is that, written as one of IPv6."""
    return getattr(address, "ipv4_mapped", None) or address


def advice(key: object, known: Iterable[str]) -> str:
    """Return what to say of an unknown name: the nearest known one, or all."""
    names = list(known)
    return near(key, names) or f"there are {', '.join(names)}"


def near(key: object, known: Iterable[str]) -> str | None:
    """Return a question for the known name that resembles it most, or ``None`` if none does."""
    from difflib import get_close_matches  # here: only mistakes need it

    found = get_close_matches(str(key), list(known), n=1)
    return f"did you mean {found[0]!r}?" if found else None


def _expected(type_: Any, error: msgspec.ValidationError) -> str:
    if get_origin(type_) is Literal:
        return f"expected one of {', '.join(map(repr, get_args(type_)))}"
    return str(error)
