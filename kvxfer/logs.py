"""The loggers of kvxfer: each record is one line of printable characters, whatever a peer or client put into a name."""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from kvxfer.text import escaped

__all__ = ["logger"]


def logger(name: str) -> logging.Logger:
    """Return the logger of this name, which escapes what is not printable. Back ends and connectors use it too.

    A traceback keeps its lines. The text of each exception in it is one line.
    """
    found = logging.getLogger(name)
    found.addFilter(_ESCAPED)
    return found


class _Escaped(logging.Filter):
    """Escapes each record that is logged through the logger itself, before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            record.msg, record.args = escaped(record.getMessage()), None
        except Exception:  # as where arguments do not fit: the handler reports it
            return True
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            record.exc_text = _traceback(record.exc_info)
        return True


_ESCAPED = _Escaped()


def _traceback(error: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]) -> str:
    parts = traceback.format_exception(*error)
    return "".join(map(_kept, parts)).rstrip("\n")


def _kept(part: str) -> str:
    """Return a part of a traceback: a frame with its lines, all else, such as an exception's text, as one line."""
    body = part.strip("\n")
    before, _, after = part.partition(body) if body else (part, "", "")
    frame = body.lstrip(" |").startswith('File "')
    return before + ("\n".join(map(escaped, body.split("\n"))) if frame else escaped(body)) + after
