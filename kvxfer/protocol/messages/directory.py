"""The messages to and from an engine's directory."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer import arguments
from kvxfer.facts import Facts
from kvxfer.geometry import Cache
from kvxfer.identity import TransferId
from kvxfer.protocol.messages.bounds import MAX_NAMES, Count, Digest, Number, WireMessage, shorten
from kvxfer.values import MAX_DIGEST


class Lookup(WireMessage, frozen=True, tag="lookup"):
    """Anyone to a directory: send me the descriptor of your engine."""

    protocol: int


class RankDescriptor(WireMessage, frozen=True):
    """What a directory tells about one rank of its engine."""

    address: str  # where the rank's agent listens
    epoch: Number  # the agent's epoch
    cache: Cache  # the layout of the rank's cache
    backends: tuple[str, ...]  # the back ends with which links to the rank may be made


class EngineDescriptor(WireMessage, frozen=True, tag="engine"):
    """A directory's answer: the engine's epoch, all its ranks, and what all its KV depends on."""

    protocol: int
    engine: str
    epoch: Number
    ranks: tuple[RankDescriptor, ...]
    facts: Facts = {}


class Named(WireMessage, frozen=True):
    """A transfer with its digest, which only engines that know the prompt can name; the transfer's name could be guessed."""

    transfer: TransferId
    digest: Digest

    def __post_init__(self) -> None:
        arguments.instance("transfer", self.transfer, TransferId)
        arguments.bytes_of("digest", self.digest, MAX_DIGEST, empty=True)


MAX_ANSWER = 1 << 14
"""The most characters of the name of an answer."""

Names = Annotated[tuple[Named, ...], Meta(max_length=MAX_NAMES)]


class Renew(WireMessage, frozen=True, tag="renew"):
    """A consumer's scheduler side to the producer's: these transfers are still wanted, keep their leases."""

    epoch: Number
    transfers: Names


class Decline(WireMessage, frozen=True, tag="decline"):
    """A consumer's scheduler side to the producer's: these will never be fetched, free them."""

    epoch: Number
    transfers: Names
    reason: str
    # the name of an answer that has told of these: nothing else that it has told of will be fetched either. May be empty
    answer: Annotated[str, Meta(max_length=MAX_ANSWER)] = ""

    def __post_init__(self) -> None:
        shorten(self)


class Await(WireMessage, frozen=True, tag="await"):
    """A consumer's scheduler side to the producer's directory: say when you have begun with these."""

    epoch: Number
    transfers: Names


class Begun(WireMessage, frozen=True, tag="begun"):
    """The directory's answer to ``Await``, at once or later: the engine has begun with these, or they are over."""

    transfers: Names


class OtherContent(WireMessage, frozen=True, tag="other"):
    """The same, if what the engine has begun with under these names is not what was asked for. What it is it does not say."""

    transfers: Names


MAX_CHAIN = 1 << 16
"""The most bytes of a chain."""


class Inquire(WireMessage, frozen=True, tag="inquire"):
    """A consumer's scheduler side to any other: offer me, under this name, what you hold of these tokens."""

    epoch: Number
    transfer: TransferId  # the name, which the consumer has made
    step: Count  # tokens from one link of the chain to the next
    # the chain: a digest of all tokens so far after each ``step`` tokens
    links: Annotated[bytes, Meta(max_length=MAX_CHAIN)]


class InquiryAnswer(WireMessage, frozen=True, tag="inquiry_answer"):
    """The directory's answer to ``Inquire``: this many tokens are offered under that name."""

    transfer: TransferId
    epoch: Number  # the epoch of the engine that answers
    tokens: Count = 0  # how many. 0: nothing is
    digest: Digest = b""  # the link of the chain behind them, which is the digest of the offer
    reason: str = ""  # why nothing is, where it may be something another time

    def __post_init__(self) -> None:
        shorten(self)
