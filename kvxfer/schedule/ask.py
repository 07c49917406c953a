"""The life of a request's question to other engines: one record, and one table. ``docs/engine-room.md`` draws the table.

A request that is about to compute a prompt asks others what they hold of it. From the best answer it loads (``Load``), under the name
that the question has given it. They are asked only once the engine looks for blocks for the request: what they hold for it would be held
in vain while it waits in a queue. The answers that it does not take are declined, also those that come too late.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from kvxfer.identity import RequestId, Source, TransferId
from kvxfer.schedule.chain import Chain
from kvxfer.schedule.load import Load, LoadedTransfer
from kvxfer.transitions import Life, Transitions, pairs


class AskState(enum.StrEnum):
    """The states of one request's question."""

    NEW = "new"  # nobody has been asked yet: the engine has not looked for blocks for the request
    OUT = "out"  # sources have been asked, and it is not decided yet what is loaded
    LOADING = "loading"  # the best answer is loaded
    CLOSED = "closed"  # nobody needs an answer any more


class AskEvent(enum.StrEnum):
    """What happens to a question."""

    SEND = "engine looks for blocks for the request"
    TAKE = "the best answer pays"
    NOTHING = "no source holds anything, or none has said so in time"
    NOT_WORTH_IT = "no answer pays"
    DELIVERED = "its load is delivered"
    FAILED = "its load has failed"
    GIVE_UP = "request over, or admitted before it is decided"


_S, _E = AskState, AskEvent

ASK: Transitions[AskState, AskEvent] = Transitions(
    moves={
        (_S.NEW, _E.SEND): _S.OUT,
        (_S.NEW, _E.GIVE_UP): _S.CLOSED,
        (_S.OUT, _E.TAKE): _S.LOADING,
        **{(_S.OUT, e): _S.CLOSED for e in (_E.NOTHING, _E.NOT_WORTH_IT, _E.GIVE_UP)},
        **{(_S.LOADING, e): _S.CLOSED for e in (_E.DELIVERED, _E.FAILED, _E.GIVE_UP)},
    },
    ignored={"it is closed": pairs((_S.CLOSED,), (_E.DELIVERED, _E.FAILED, _E.GIVE_UP))},
    never={
        "sources are asked once": pairs((_S.OUT, _S.LOADING, _S.CLOSED), (_E.SEND,)),
        "it is decided once, after they have been asked": pairs(
            (_S.NEW, _S.LOADING, _S.CLOSED), (_E.TAKE, _E.NOTHING, _E.NOT_WORTH_IT)
        ),
        "nothing is loaded yet": pairs((_S.NEW, _S.OUT), (_E.DELIVERED, _E.FAILED)),
    },
)


DECIDED = frozenset({_S.LOADING, _S.CLOSED})
"""States in which no further answer is of use: when a question comes to one, those that it does not take are declined."""


@dataclass(frozen=True, slots=True)
class PrefixOffer:
    """An answer that is more than "nothing": what a source offers, and where."""

    transfer: TransferId
    source: Source
    tokens: int
    digest: bytes


@dataclass(slots=True, eq=False)
class Ask(Life[AskState, AskEvent]):
    """One question, of a request or of several that ask the same: samples of one prompt. One of them loads the answer."""

    table: ClassVar = ASK

    kind: str  # who has named the sources
    chain: Chain  # the tokens that are of use
    sources: tuple[Source, ...]  # who is asked
    state: AskState = _S.NEW
    asked: dict[TransferId, Source] = field(default_factory=dict)  # who has yet to answer, by the name that each got
    answers: list[PrefixOffer] = field(default_factory=list)  # what the others offer
    requests: set[RequestId] = field(default_factory=set)  # the engine's names of the requests that are not over
    sent: int = 0  # how many have been asked
    heard: int = 0  # how many have answered, if only "nothing"
    taken: PrefixOffer | None = None  # the answer that is loaded
    # what it loads; any other that one of these requests loads is not the question's
    transfer: LoadedTransfer | None = None
    asked_at: float = 0.0
    decided_at: float = 0.0  # when it was decided what to do

    def answered(self, transfer: TransferId, epoch: int, tokens: int, digest: bytes) -> PrefixOffer | None:
        """Take in what a source has answered; return what it offers, if that is not nothing.

        An answer counts as nothing if its digest is not that of the first ``tokens`` tokens.
        """
        source = self.asked.pop(transfer)
        self.heard += 1
        if not tokens or self.chain.digest(tokens) != digest:
            return None
        offered = PrefixOffer(transfer, Source(source.host, source.port, epoch), tokens, digest)
        self.answers.append(offered)
        return offered

    def loads(self, load: Load | None) -> bool:
        """Return whether a load fetches the answer that is taken."""
        return load is not None and load.transfer is self.transfer and load.fetched is not None

    @property
    def done(self) -> bool:
        """Whether no further answer can be better than those that are here."""
        return not self.asked or any(one.tokens == self.chain.tokens for one in self.answers)
