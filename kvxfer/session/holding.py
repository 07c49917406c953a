"""What the producer's machine keeps of a transfer: plain records, and the few questions that need nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.identity import TransferId
from kvxfer.session import messages as m
from kvxfer.session.life import SERVE, ServeEvent, ServeState
from kvxfer.session.parts import Table
from kvxfer.session.values import LinkId, LinkInfo, Offered, Outcome, PartRef

__all__ = ["Holding", "Key", "Link", "Over", "Serve", "follows", "unfit", "words"]

Key = tuple[LinkId, int]
"""A serve: the link and the consumer's attempt."""


@dataclass
class Link:
    """A consumer rank that has said hello. ``stream``: the next number of a part. ``serves``, ``nbytes``: how many wants
    of it are alive, and the size of their block tables."""

    info: LinkInfo
    stream: int = 0
    serves: int = 0
    nbytes: int = 0


@dataclass
class Serve:
    """One attempt of one consumer rank."""

    holding: Holding
    link: LinkId
    want: m.Want
    blocks: Table
    reader: int  # the consumer's agent, by its epoch
    expires: float
    state: ServeState = ServeState.WAITING
    sent: int = 0  # tokens announced so far
    part: int = 0
    final: bool = False
    generation: int = -1
    again: bool = False  # what Gone will say
    reason: str = ""
    unsent: dict[PartRef, m.Have] = field(default_factory=dict)  # write: told when the bytes are there
    flight: set[PartRef] = field(default_factory=set)  # own parts that may still touch memory

    def on(self, stimulus: ServeEvent) -> bool:
        """Take a transition; false when the stimulus means nothing in this state."""
        after = SERVE.after(self.state, stimulus)
        if after is None:
            return False
        self.state = after
        return True

    @property
    def nbytes(self) -> int:
        """Size of its block tables on the wire."""
        return sum(map(len, self.want.blocks))

    @property
    def key(self) -> Key:
        return self.link, self.want.attempt

    @property
    def live(self) -> bool:
        return self.state in (ServeState.WAITING, ServeState.SERVING)


@dataclass
class Holding:
    """A transfer as this rank knows it."""

    transfer: TransferId
    began: float
    leased: float  # until when the offer is kept though nobody asks
    offer: Offered | None = None
    generation: int = -1  # the last one that was offered or revoked
    revoked: int = -1  # this one and older ones are given up
    serves: dict[Key, Serve] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    misfits: set[int] = field(default_factory=set)  # wanted something else under its name; their word does not count
    readers: int = 1
    nbytes: int = 0
    outcome: Outcome | None = None
    known: bool = False  # the engine has spoken of it and waits for its end


@dataclass(frozen=True)
class Over:
    """What is remembered of a holding that has ended."""

    outcome: Outcome
    generation: int  # whose end the engine has been told; -1: it had not spoken of it yet


def follows(new: Offered, old: Offered) -> bool:
    """Whether an offer says more than the last one."""
    if new.generation != old.generation:
        return new.generation > old.generation
    return not old.final and (new.final or new.tokens > old.tokens)


def unfit(offer: Offered, want: m.Want, info: LinkInfo) -> str | None:
    """Why this offer can never be what the consumer wants, if so."""
    if offer.digest != want.digest:
        return "the digests differ: it is not the KV of the consumer's prompt"
    if offer.final and offer.tokens < want.tokens:
        return f"the producer holds {offer.tokens} tokens, the consumer wants {want.tokens}"
    if offer.final and offer.tokens != want.tokens and any(g.kind == "state" for g in info.planner.src.groups):
        return f"its state is that after token {offer.tokens}, the consumer wants {want.tokens}"
    return None


def words(outcome: Outcome) -> str:
    return outcome.reason or "all its readers have fetched it"
