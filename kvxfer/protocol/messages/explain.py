"""What an operator asks a directory about requests: `kvxfer why`, and for its prefixes `kvxfer doctor`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.protocol.messages.bounds import MAX_WORDS, Count, Number, Seconds, WireMessage

MAX_STORIES = 50
"""The most stories in one answer."""
MAX_STAGES = 32

Text = Annotated[str, Meta(max_length=MAX_WORDS)]
Key = Annotated[bytes, Meta(min_length=8, max_length=8)]
At = Annotated[float, Meta(ge=-1e12, le=1e12)]


class Explain(WireMessage, frozen=True, tag="explain"):
    """An operator to a directory: what has become of these requests?"""

    # text that the engine's name of the request contains; with ``transfers``, either is enough. Empty, and without
    # ``transfers``: the last requests that failed
    request: Text = ""
    transfers: Annotated[tuple[Key, ...], Meta(max_length=MAX_STORIES)] = ()  # keys of transfers (``Story.key``)
    most: Annotated[int, Meta(ge=1, le=MAX_STORIES)] = 10  # how many stories to tell, the latest first


class Story(WireMessage, frozen=True):
    """One request on one side."""

    # whether this engine loaded (``consumer``) or offered (``producer``), or neither
    role: Literal["consumer", "producer", "none"]
    request: Text  # the engine's name of the request
    transfer: Text = ""  # the transfer's name, without the digest that only those who know the prompt may know
    key: Annotated[bytes, Meta(max_length=8)] = b""  # by which both sides know that they speak of the same transfer
    peer: Text = ""  # on a consumer, the producer's directory
    outcome: Text = ""  # ``delivered``, a kind of failure, or where it is if it is not over
    over: bool = True  # whether it is over
    text: Text = ""  # why it failed, or why this engine takes no part; may be empty
    at: At = 0.0  # the Unix time at which it began here
    # seconds from then to each stage that it reached
    stages: Annotated[dict[Annotated[str, Meta(max_length=40)], At], Meta(max_length=MAX_STAGES)] = {}
    tokens: Count = 0  # how many tokens it is about
    came: Number = 0  # the bytes that have come, or, on a producer, that consumers have confirmed
    announced: Number = 0  # the bytes that were announced
    moving: At = 0.0  # the seconds in which something was on its way


class Prefixes(WireMessage, frozen=True):
    """What an engine has answered to others that asked what it holds of a prompt, and what came of its own questions, from its start on."""

    inquiries: Number = 0  # questions of others
    held: Number = 0  # those of them for which something was offered
    offered: Number = 0  # tokens that were offered for them
    refused: Number = 0  # those that were answered with less than is held, for want of room
    answer_s: Seconds = 0.0  # the median time from a question to its answer, of the latest ones; 0 if there was none
    asked: Number = 0  # requests for which this engine has asked others
    unanswered: Number = 0  # those of them to which no engine has answered in time
    found: Number = 0  # tokens that others held for them, beyond what was cached here
    loaded: Number = 0  # those of them that were loaded
    dear: Number = 0  # those that were computed, because no load would have ended sooner
    recomputed: Number = 0  # those whose load failed, so that they were computed


class Explained(WireMessage, frozen=True, tag="explained"):
    """A directory's answer to ``Explain``."""

    engine: Text  # the engine's name
    now: At  # the Unix time there
    kept: Count  # how many requests of each kind the engine remembers; 0 if it keeps no stories
    stories: Annotated[tuple[Story, ...], Meta(max_length=2 * MAX_STORIES)] = ()  # those asked for, the latest first
    prefixes: Prefixes = Prefixes()  # what became of questions for prefixes
