"""Settings that a user wrote, read in one way: the configuration's and the options of every back end.

An unknown name is answered with the nearest known one, a wrong value with what is expected. Whoever writes a back end
uses it too: ``read(Options, options, "option {!r} of back end 'mine'")``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from kvxfer.errors import ConfigError

__all__ = ["WILDCARDS", "advice", "check_dialable", "everywhere", "loopback", "near", "read", "unmapped"]

T = TypeVar("T", bound=msgspec.Struct)

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
WILDCARDS = frozenset({"0.0.0.0", "::", "*"})


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
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if key not in types:
            raise ConfigError(f"unknown {naming.format(key)}: {advice(key, types)}")
        try:
            fields[key] = msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            expected = _expected(types[key], error)
            raise ConfigError(f"{naming.format(key)} cannot be {value!r}: {expected}") from None
    return kind(**fields)


def check_dialable(listen: str, advertise: str | None, naming: str) -> None:
    """Refuse settings by which peers would be told to dial an address that stands for all addresses.

    Raises:
        ConfigError: ``listen`` is such an address, and ``advertise`` is not set.
    """
    if listen in WILDCARDS and advertise is None:
        raise ConfigError(
            f"{naming.format('listen')} is {listen!r}, which is no address that a peer could dial; "
            "set 'advertise' to this host's name or address"
        )


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
    found = get_close_matches(str(key), list(known), n=1)
    return f"did you mean {found[0]!r}?" if found else None


def _expected(type_: Any, error: msgspec.ValidationError) -> str:
    if get_origin(type_) is Literal:
        return f"expected one of {', '.join(map(repr, get_args(type_)))}"
    return str(error)
