"""Text that others chose, made fit for a log, a message or a terminal."""

from __future__ import annotations

__all__ = ["MAX_SHOWN", "escaped", "printable", "size"]

MAX_SHOWN = 200
"""The most characters of a name in the log."""


def escaped(text: str) -> str:
    r"""Return a text as one line of printable characters: all others, such as newlines, ESC and U+202E, as `\n`, `\x1b`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(name: object) -> str:
    """Return a request's or transfer's name cut and escaped for the log, because clients choose it freely."""
    return escaped(str(name)[:MAX_SHOWN])


def size(nbytes: float) -> str:
    """Return a number of bytes for people: 512 B, 64.0 kB, 12.5 MB, 3.20 GB."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.{1 if nbytes >= 10 * one or unit != 'GB' else 2}f} {unit}"
    return f"{nbytes:.0f} B"
