"""Checks of the arguments of public calls, so that a wrong one fails in the call that it was given to.

Engines pass what numpy and torch give them. So whatever Python accepts as an index counts as an integer and becomes an
``int`` here, lest something that cannot be encoded reach a link.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

from kvxfer.errors import ArgumentError

__all__ = [
    "MAX_INTEGER",
    "flag",
    "function",
    "instance",
    "integer",
    "integers",
    "mapping",
    "bytes_of",
    "seconds",
    "sequence_of",
    "describe",
    "duration",
    "string",
]

T = TypeVar("T")

MAX_INTEGER = (1 << 63) - 1
_SHOWN = 60


def integer(name: str, value: Any, least: int = -MAX_INTEGER, most: int = MAX_INTEGER) -> int:
    """Return an integer argument as an ``int``.

    Raises:
        ArgumentError: The value is not an integer (a ``bool`` does not count), or not in ``[least, most]``.
    """
    if type(value) is int and least <= value <= most:
        return value
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise ArgumentError(f"{name} must be an integer, not {describe(value)}")
        try:
            value = operator.index(value)
        except TypeError:
            raise ArgumentError(f"{name} must be an integer, not {describe(value)}") from None
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise ArgumentError(f"{name} must be {bound}, not {value if abs(value) < 1 << 80 else 'a larger number'}")
    return int(value)


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Return integer arguments as a tuple of ``int``.

    Raises:
        ArgumentError: The values are not an iterable of integers.
    """
    if type(values) is tuple and all(type(value) is int for value in values):
        return values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} must be a tuple of integers, not {describe(values)}")
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def seconds(name: str, value: Any) -> float:
    """Return a time to wait as a ``float``; a negative one becomes 0.

    Raises:
        ArgumentError: The value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ArgumentError(f"{name} must be a number of seconds, not {describe(value)}")
    return max(0.0, float(value))


def duration(name: str, value: Any) -> float:
    """Return a length of time as a ``float``.

    Raises:
        ArgumentError: The value is not a number, or negative.
    """
    found = seconds(name, value)
    if value < 0:
        raise ArgumentError(f"{name} must be at least 0, not {describe(value)}")
    return found


def flag(name: str, value: Any) -> bool:
    """Return a truth value as a ``bool``; only Python's and numpy's ``bool`` count.

    Raises:
        ArgumentError: The value is neither ``True`` nor ``False``.
    """
    if type(value) is not bool and type(value).__name__ not in ("bool", "bool_"):  # numpy's, by either of its names
        raise ArgumentError(f"{name} must be True or False, not {describe(value)}")
    return bool(value)


def string(name: str, value: Any, most: int = 1 << 12, *, empty: bool = False) -> str:
    """Return a text argument.

    Raises:
        ArgumentError: The value is not a ``str``, is empty, longer than ``most`` characters, or not valid Unicode.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a str, not {describe(value)}")
    if not value and not empty:
        raise ArgumentError(f"{name} must not be empty")
    if len(value) > most:
        raise ArgumentError(f"{name} must have at most {most} characters, not {len(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ArgumentError(f"{name} must be valid Unicode, not {describe(value)}") from None
    return value


def bytes_of(name: str, value: Any, most: int, *, empty: bool = False) -> bytes:
    """Return an argument of bytes.

    Raises:
        ArgumentError: The value is not ``bytes``, is empty, or longer than ``most``.
    """
    if not isinstance(value, bytes):
        raise ArgumentError(f"{name} must be bytes, not {describe(value)}")
    if not value and not empty:
        raise ArgumentError(f"{name} must not be empty")
    if len(value) > most:
        raise ArgumentError(f"{name} must have at most {most} bytes, not {len(value)}")
    return value


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Return an argument that must be an instance of a class.

    Raises:
        ArgumentError: The value is not.
    """
    if not isinstance(value, kind):
        ours = "kvxfer " if kind.__module__.startswith("kvxfer") else ""
        raise ArgumentError(f"{name} must be a {ours}{kind.__name__}, not {describe(value)}")
    return value


def sequence_of(name: str, values: Any, kind: type[T], least: int = 0) -> tuple[T, ...]:
    """Return an argument of at least ``least`` instances of a class, as a tuple.

    Raises:
        ArgumentError: The values are not iterable, are too few, or one is of another class.
    """
    if isinstance(values, str | bytes | kind) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} must be a tuple of {kind.__name__}, not {describe(values)}")
    found = tuple(instance(f"{name}[{i}]", value, kind) for i, value in enumerate(values))
    if len(found) < least:
        raise ArgumentError(f"{name} must be at least {least}, not {len(found)}")
    return found


def mapping(name: str, value: Any, of: str) -> Mapping[Any, Any]:
    """Return an argument that must be a mapping; ``of`` names its content for the message.

    Raises:
        ArgumentError: The value is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a mapping of {of}, not {describe(value)}")
    return value


def function(name: str, value: Any) -> Any:
    """Return an argument that must be callable or ``None``.

    Raises:
        ArgumentError: The value is neither.
    """
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be a function or None, not {describe(value)}")
    return value


def describe(value: Any) -> str:
    """Return a value as a message shows it: short, and with its type."""
    plain = isinstance(value, str | bytes | float | None) or (isinstance(value, int) and value.bit_length() <= 256)
    words = repr(value) if plain else ""  # Python refuses to write out very long numbers
    cut = words if len(words) <= _SHOWN else words[:_SHOWN] + "..."
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return cut if value is None else f"{cut} ({where}{kind.__qualname__})" if cut else f"a {where}{kind.__qualname__}"
