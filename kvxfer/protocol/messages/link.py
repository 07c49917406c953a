"""A link's messages: from its hello to its heartbeat, and the refusal that ends it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.config import Integrity
from kvxfer.facts import Facts
from kvxfer.failures import FailureKind
from kvxfer.geometry import Cache, ShardAssignment
from kvxfer.protocol.messages.bounds import Count, Number, WireMessage, shorten


class Hello(WireMessage, frozen=True, tag="hello"):
    """Consumer to producer rank: who I am, and how I will read your cache."""

    protocol: int
    backend: str
    expect_epoch: Number  # the epoch of the agent that the consumer wants to reach
    epoch: Number  # the consumer's number, which it tells to this producer rank alone
    engine: str
    endpoint: bytes  # the endpoint of the consumer's back end
    cache: Cache
    assignments: tuple[ShardAssignment, ...]  # what the consumer will read of the producer rank's cache
    mode: str  # how the consumer uses the back end
    piece_bytes: Count  # the size of its staged pieces
    integrity: Integrity = "off"
    facts: Facts = {}  # what all KV of the consumer depends on (``kvxfer.facts``)
    stage_below: Count = 0  # parts whose rows have fewer bytes on average must come staged


class Welcome(WireMessage, frozen=True, tag="welcome"):
    """Producer: the answer to ``Hello``, by which the link is made."""

    epoch: Number
    endpoint: bytes
    piece_bytes: Count  # the agreed size of a staged piece: the smaller one of both sides
    integrity: Integrity = "off"  # the agreed setting: the stricter one of both sides
    # where consumers on the producer's host find its revocation counter
    revocations: Annotated[str, Meta(max_length=100)] = ""


class Refused(WireMessage, frozen=True, tag="refused"):
    """Producer: there is no link, or no longer one. The reason is logged on both sides."""

    kind: FailureKind
    reason: str
    again: bool  # whether dialling again may help; if not, what was on the link has failed
    backend: bool = False  # whether the link could not be made with this back end, but may be with another

    def __post_init__(self) -> None:
        shorten(self)


class Ping(WireMessage, frozen=True, tag="ping"):
    """Consumer: are you alive? This is asked on every link, busy or not."""

    number: Number


class Pong(WireMessage, frozen=True, tag="pong"):
    """Producer: yes, to the ``Ping`` of the same number."""

    number: Number
