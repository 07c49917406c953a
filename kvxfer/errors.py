"""What kvxfer raises.

The message is for people: what happened, to which request and peer, what to do. The kind is for programs to act upon.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvxfer.failures import FailureKind
from kvxfer.text import escaped

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError)
"""What decoding raises for bytes that are not what they should be. A peer may send any, such as thousands of arrays in each other."""


class KvxferError(Exception):
    """Base of all errors that kvxfer raises on purpose.

    Args:
        message: What happened. It is kept as one line of printable characters, because it may quote a peer.
        kind: The failure kind of a transfer that ends because of this error; by default the one of the class.
        advice: What to do about it, if more is known than what is advised for its kind. The text ends with it.
    """

    default: ClassVar[FailureKind] = FailureKind.MISUSE

    def __init__(self, message: object = "", *, kind: FailureKind | None = None, advice: str = "") -> None:
        super().__init__(escaped(f"{message}; {advice}" if advice else str(message)))
        self.kind = self.default if kind is None else kind
        self.advice = escaped(advice)


class ArgumentError(KvxferError, ValueError):
    """An argument of a call is wrong. The message begins with its name; nothing has been started or sent."""


class ClosedError(KvxferError):
    """The object has been closed, by this or another thread: it accepts no more calls, and its transfers have ended."""

    default = FailureKind.CANCELLED


class ConfigError(KvxferError):
    """The configuration is wrong; raised before anything has started."""

    default = FailureKind.INCOMPATIBLE


class TransportError(KvxferError):
    """A back end could not do what was asked of it."""

    default = FailureKind.BACKEND_FAILED


class PeerError(KvxferError):
    """A peer refused, disappeared or broke the protocol."""

    default = FailureKind.PEER_LOST


def why_not_loaded(error: Exception) -> str:
    """Return the text for an error that another module raised when it was imported: with its type, where the text needs it."""
    return str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
