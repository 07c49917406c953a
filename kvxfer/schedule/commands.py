"""What a scheduler side ships to its workers besides offers and fetches: values, good for pickle and msgpack."""

from collections.abc import Sequence

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.identity import Generation, Source, TransferId
from kvxfer.values import BlockTable, Fetch, Group, Offer

__all__ = ["Cancel", "DeclinedTransfer", "Revoke", "ScheduleError", "StepCommands", "check_table"]


class ScheduleError(KvxferError):
    """A call that makes no sense at this point: a bug in the engine or connector that made it."""


def check_table(groups: Sequence[Group], table: BlockTable) -> None:
    """Refuse a block table that is not one of these groups.

    Raises:
        ScheduleError: It is not.
    """
    if len(table) != len(groups):
        raise ScheduleError(f"a block table of {len(table)} groups in an engine that has {len(groups)}")


class Revoke(msgspec.Struct, frozen=True):
    """A generation is over: its blocks may be reused from the step on that this travels with.

    Workers take it in before that step's forward pass and confirm no read of this generation afterwards. It ends all
    older generations of the transfer, too, and may come for one that nothing was offered of.

    Attributes:
        gone: The transfer is over; nothing follows, and a worker forgets it once it is quiet. Every transfer that an
            ``OfferSchedule`` took up ends with exactly one such revocation, those that all have read included; readers
            that have not read all fail at once. If not gone (preemption), a reader may wait for the next generation.
        kept: The blocks stay as they are until all workers have released them: those who are reading by then may finish with
            what has been offered.
    """

    transfer: TransferId
    generation: Generation
    reason: str
    gone: bool
    kept: bool = False


class Cancel(msgspec.Struct, frozen=True):
    """The engine no longer needs what it fetches. The workers report the end as they report any other."""

    handle: str
    reason: str


class StepCommands(msgspec.Struct, frozen=True):
    """Everything that the workers must know with one step; false if there is nothing.

    Workers apply ``revokes`` before the step's forward pass, then ``fetches`` and ``cancels``, and ``offers`` after it.
    """

    offers: tuple[Offer, ...] = ()
    revokes: tuple[Revoke, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    cancels: tuple[Cancel, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.offers or self.revokes or self.fetches or self.cancels)


class DeclinedTransfer(msgspec.Struct, frozen=True):
    """A consumer will never ask for this transfer: the producer may drop it.

    Not for workers, who never heard of the transfer: the scheduler side tells the producer's directory.
    """

    transfer: TransferId
    digest: bytes
    source: Source
    reason: str
