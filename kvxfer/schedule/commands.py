"""What a scheduler side and its workers send each other besides offers and fetches: values, fit for pickle and msgpack."""

from collections.abc import Sequence

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.failures import Failure
from kvxfer.identity import Generation, RequestId, Source, TransferId
from kvxfer.values import BlockTable, Fetch, Group, Offer, Rank, Stages


class ScheduleError(KvxferError):
    """A call makes no sense at this point: a bug in the engine or connector that made it."""


def check_table(groups: Sequence[Group], table: BlockTable) -> None:
    """Refuse a block table that does not have one row for each of these groups.

    Raises:
        ScheduleError: It does not.
    """
    if len(table) != len(groups):
        raise ScheduleError(f"a block table of {len(table)} groups in an engine that has {len(groups)}")


class Revoke(msgspec.Struct, frozen=True):
    """A generation is over: its blocks may be reused from the step on with which this is sent.

    Workers apply it before that step's forward pass, and confirm no read of this generation afterwards. It ends all
    older generations of the transfer too, and may come for one of which nothing was offered.

    Attributes:
        transfer: The transfer.
        generation: The generation.
        reason: Why, for readers and the log.
        gone: Whether the transfer is over: nothing follows, and a worker forgets it once it is quiet. Every transfer that an
            ``OfferSchedule`` accepted ends with exactly one such revocation, even if all consumers have read it; readers
            that have not read everything fail at once. If not gone (preemption), a reader may wait for the next generation.
        kept: Whether the blocks stay as they are until all workers have released them, so that consumers that are reading may
            finish with what has been offered.
    """

    transfer: TransferId
    generation: Generation
    reason: str
    gone: bool
    kept: bool = False


class Cancel(msgspec.Struct, frozen=True):
    """The engine no longer needs the fetch of a number. The workers report its end as they report any other."""

    number: int
    reason: str


class StepCommands(msgspec.Struct, frozen=True):
    """Everything that the workers must know with one step; false if that is nothing.

    Workers apply ``revokes`` before the step's forward pass, then ``fetches`` and ``cancels``, and ``offers`` after it.
    """

    offers: tuple[Offer, ...] = ()
    revokes: tuple[Revoke, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    cancels: tuple[Cancel, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.offers or self.revokes or self.fetches or self.cancels)


class DeclinedTransfer(msgspec.Struct, frozen=True):
    """A consumer will never ask for this transfer, so the producer may drop it.

    It is not for workers, which do not know the transfer: the scheduler side tells the producer's directory.
    """

    transfer: TransferId
    digest: bytes
    source: Source
    reason: str
    answer: str = ""  # nor for anything else of which the answer of this name has told


class RankResult(msgspec.Struct, frozen=True):
    """How a load has ended on one rank: the one form in which a rank says so, by the side channel and with a step.

    A rank reports a load once nothing writes to its blocks any more. One that has failed before that, or was delivered into lent blocks,
    it reports twice.
    """

    handle: RequestId
    rank: Rank
    number: int  # the number of the fetch, because a later load may have the same handle
    generation: Generation | None = None  # the generation that was delivered; None if nothing had to be moved
    failure: Failure | None = None  # why it was not delivered; None if it was
    quiet: bool = False  # whether nothing writes to its blocks any more
    stages: Stages = Stages()  # when it reached each stage
    short: int | None = None  # the token up to which it was delivered, if not whole
