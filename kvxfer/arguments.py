"""What the arguments of public calls are held to, so that a wrong one is answered by the call that has it.

Engines pass what numpy and torch give them: an integer is whatever Python takes for an index, and becomes an ``int``
here, so that nothing that cannot be encoded reaches a link.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeVar

from kvxfer.errors import ArgumentError

__all__ = ["MOST_INTEGER", "flag", "instance", "integer", "integers", "octets", "shown", "string"]

T = TypeVar("T")

MOST_INTEGER = (1 << 63) - 1
_SHOWN = 60


def integer(name: str, value: Any, least: int = -MOST_INTEGER, most: int = MOST_INTEGER) -> int:
    """Return an integer argument as an ``int``.

    Raises:
        ArgumentError: It is no integer (a ``bool`` is none), or not in ``[least, most]``.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise ArgumentError(f"{name} must be an integer, not {shown(value)}")
        try:
            value = operator.index(value)
        except TypeError:
            raise ArgumentError(f"{name} must be an integer, not {shown(value)}") from None
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise ArgumentError(f"{name} must be {bound}, not {value if abs(value) < 1 << 80 else 'a larger number'}")
    return int(value)


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Return integer arguments as a tuple of ``int``.

    Raises:
        ArgumentError: One is no integer, or there is no series of them.
    """
    if type(values) is tuple and all(type(value) is int for value in values):
        return values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} must be a tuple of integers, not {shown(values)}")
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def flag(name: str, value: Any) -> bool:
    """Return a truth value as a ``bool``; only what means nothing else is one.

    Raises:
        ArgumentError: It is neither ``True`` nor ``False``.
    """
    if type(value) is not bool and type(value).__name__ not in ("bool", "bool_"):  # numpy's, by either of its names
        raise ArgumentError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def string(name: str, value: Any, most: int = 1 << 12, *, empty: bool = False) -> str:
    """Return a text argument.

    Raises:
        ArgumentError: It is no ``str``, is empty, longer than ``most`` characters, or not valid Unicode.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a str, not {shown(value)}")
    if not value and not empty:
        raise ArgumentError(f"{name} must not be empty")
    if len(value) > most:
        raise ArgumentError(f"{name} must have at most {most} characters, not {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{name} must be valid Unicode, not {shown(value)}") from None
    return value


def octets(name: str, value: Any, most: int) -> bytes:
    """Return an argument of bytes.

    Raises:
        ArgumentError: It is not ``bytes``, or longer than ``most``.
    """
    if not isinstance(value, bytes):
        raise ArgumentError(f"{name} must be bytes, not {shown(value)}")
    if len(value) > most:
        raise ArgumentError(f"{name} must have at most {most} bytes, not {len(value)}")
    return value


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Return an argument that must be of a class of ours.

    Raises:
        ArgumentError: It is not.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} must be a kvxfer {kind.__name__}, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return a value for a message, short, with its type where that is what is wrong with it."""
    plain = isinstance(value, str | bytes | float | None) or (isinstance(value, int) and value.bit_length() <= 256)
    words = repr(value) if plain else ""  # Python refuses to write out very long numbers
    cut = words if len(words) <= _SHOWN else words[:_SHOWN] + "..."
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return cut if value is None else f"{cut} ({where}{kind.__qualname__})" if cut else f"a {where}{kind.__qualname__}"
