"""What kvxfer raises. A message says what happened, to whom, and what to do; a kind says what a program may act upon."""

from __future__ import annotations

from typing import ClassVar

from kvxfer.failures import FailureKind


class KvxferError(Exception):
    """Base of all errors that kvxfer raises on purpose.

    Args:
        message: What happened.
        kind: What a transfer that ends by it has failed with; by default the kind of the class.
    """

    default: ClassVar[FailureKind] = FailureKind.MISUSE

    def __init__(self, message: object = "", *, kind: FailureKind | None = None) -> None:
        super().__init__(message)
        self.kind = self.default if kind is None else kind


class ArgumentError(KvxferError, ValueError):
    """An argument of a call is wrong: nothing has been begun, and nothing sent. The message begins with its name."""


class ClosedError(KvxferError):
    """What was called has been closed, by whichever thread: it does nothing more, and what it had in hand has ended."""

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
