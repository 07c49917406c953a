"""Failures as values: the ways in which a transfer can fail, and how it ended."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvxfer.text import escaped

__all__ = ["ADVICE", "DELIVERED", "Failure", "FailureKind", "Outcome"]


class FailureKind(enum.StrEnum):
    """The ways in which a transfer can fail: a closed set, the same on the wire, in logs and in metrics.

    ``docs/troubleshooting.md`` has a section on each.
    """

    NEVER_OFFERED = "never_offered"
    WITHDRAWN = "withdrawn"
    UNFETCHED = "unfetched"
    REVOKED = "revoked"
    DIGEST_DIFFERS = "digest_differs"
    INCOMPATIBLE = "incompatible"
    NO_SUCH_ENGINE = "no_such_engine"
    NOT_PUBLISHED = "not_published"
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_LOST = "peer_lost"
    TIMED_OUT = "timed_out"
    CORRUPT = "corrupt"
    REFUSED = "refused"
    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"
    BACKEND_FAILED = "backend_failed"
    MISUSE = "misuse"


ADVICE: Mapping[FailureKind, str] = MappingProxyType(
    {
        FailureKind.NEVER_OFFERED: "check that the producer's engine ran this request, and as far as was wanted",
        FailureKind.WITHDRAWN: "look in the log of the engine that gave the request up, or raise the producer's 'lease'",
        FailureKind.UNFETCHED: "check that the router sends the request to an engine that loads, or raise 'lease' if it queues there for "
        "long",
        FailureKind.REVOKED: "the producer preempts requests: give it more memory, or fewer requests at a time",
        FailureKind.DIGEST_DIFFERS: "have the router give both engines the params of the same request",
        FailureKind.INCOMPATIBLE: "run the same model, settings and version of kvxfer on both engines; if checkpoints differ only in "
        "form, give both the same 'model'",
        FailureKind.NO_SUCH_ENGINE: "find out why the engine that was named ended; the next prefill names its successor",
        FailureKind.NOT_PUBLISHED: "wait until the engine is up, and name it to others once its ranks are published",
        FailureKind.PEER_UNREACHABLE: "check that the peer runs, and that its 'advertise' and 'port' lead to it",
        FailureKind.PEER_LOST: "check that the peer still runs, and read the end of its log",
        FailureKind.TIMED_OUT: "look at the load of both engines, or raise 'transfer_timeout' on both",
        FailureKind.CORRUPT: "check the network and memory of both hosts, or use another back end",
        FailureKind.REFUSED: "check 'peers' and 'key_file' on both engines",
        FailureKind.OVERLOADED: "give this producer fewer requests at a time, or add producers",
        FailureKind.CANCELLED: "no action is needed: an engine or a client ended the request, or an agent was closed",
        FailureKind.BACKEND_FAILED: "run `kvxfer doctor` on both hosts, or choose another back end",
        FailureKind.MISUSE: "report it to those who maintain the connector or the peer: it broke the protocol",
    }
)
"""What an operator can do about each kind."""


class Failure(msgspec.Struct, frozen=True):
    """Why something did not happen. Its text is for people, never parsed, and one printable line, whatever a peer put into it.

    Attributes:
        kind: What programs may act upon.
        detail: What happened, as a clause.
        peer: The other side, as an operator would look for it; empty if there is none, or if the detail came from it.
        advice: What to do about it; by default what ``ADVICE`` says of the kind.
    """

    kind: FailureKind
    detail: str
    peer: str = ""
    advice: str = ""

    def __post_init__(self) -> None:
        for name in ("detail", "peer", "advice"):
            if not (text := getattr(self, name)).isprintable():
                msgspec.structs.force_setattr(self, name, escaped(text))
        if not self.advice:
            msgspec.structs.force_setattr(self, "advice", ADVICE[self.kind])

    def __str__(self) -> str:
        with_peer = f" (peer {self.peer})" if self.peer else ""
        known = self.detail.endswith(self.advice)  # an error's text ends with the advice that it brings
        return f"{self.kind}{with_peer}: {self.detail}" + ("" if known else f"; {self.advice}")

    @classmethod
    def of(cls, error: BaseException, kind: FailureKind = FailureKind.BACKEND_FAILED, peer: str = "") -> Failure:
        """Make a failure of an exception: of the exception's own kind and with its own advice if it has any, else those of ``kind``."""
        own = getattr(error, "kind", None)
        detail = str(error) or type(error).__name__
        if not isinstance(own, FailureKind):
            return cls(kind, detail, peer)
        return cls(own, detail, peer, getattr(error, "advice", ""))

    def about(self, before: str, peer: str | None = None) -> Failure:
        """Return the same failure with ``before`` in front of its detail, and with this peer if one is given."""
        return Failure(self.kind, before + self.detail, self.peer if peer is None else peer, self.advice)


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How a transfer ended on this side: delivered, or with a failure."""

    failure: Failure | None = None

    @property
    def delivered(self) -> bool:
        """Whether it was delivered."""
        return self.failure is None

    @property
    def kind(self) -> FailureKind | None:
        """How it failed; ``None`` if it was delivered."""
        return None if self.failure is None else self.failure.kind

    def __str__(self) -> str:
        return "delivered" if self.failure is None else str(self.failure)


DELIVERED = Outcome()
