"""Decide what to move: follow an engine's scheduler, and make commands for its workers. Pure: no I/O, no clock, no engine."""

from collections.abc import Sequence

from kvxfer.identity import Source
from kvxfer.ledger import BlockLedger
from kvxfer.schedule.ask import ASK, Ask, AskEvent, AskState, PrefixOffer
from kvxfer.schedule.chain import Chain, Prefix
from kvxfer.schedule.commands import Cancel, DeclinedTransfer, RankResult, Revoke, ScheduleError, StepCommands
from kvxfer.schedule.consumer import FetchSchedule
from kvxfer.schedule.load import LOAD, Load, LoadEvent, LoadState
from kvxfer.schedule.offering import OFFERING, Offering, OfferingEvent, OfferingState, Pin
from kvxfer.schedule.prefix_index import KnownPrefix, PrefixIndex
from kvxfer.schedule.producer import OfferSchedule
from kvxfer.schedule.requests import EngineRequest, EngineRequests
from kvxfer.transitions import Bulkhead
from kvxfer.values import Group

__all__ = [
    "ASK",
    "LOAD",
    "OFFERING",
    "Ask",
    "AskEvent",
    "AskState",
    "Cancel",
    "Chain",
    "DeclinedTransfer",
    "EngineRequest",
    "EngineRequests",
    "FetchSchedule",
    "KnownPrefix",
    "Load",
    "LoadEvent",
    "LoadState",
    "OfferSchedule",
    "PrefixOffer",
    "Offering",
    "OfferingEvent",
    "OfferingState",
    "Pin",
    "Prefix",
    "PrefixIndex",
    "RankResult",
    "Revoke",
    "Schedule",
    "ScheduleError",
    "StepCommands",
]


class Schedule:
    """Both schedules of one engine, whichever of them its requests use.

    One request may be in both: a turn of a conversation that loads its past and offers what it adds.

    Args:
        groups: The engine's KV-cache groups, in the order of its block tables.
        own: The engine's own directory, if it has several ranks.

    Attributes:
        producer: Follows the requests that are prefilled here for other engines.
        consumer: Follows those that load from other engines.
        requests: All of these, and those that ask.
        ledger: The blocks that both let others read or fill.
        door: What no bug of a table leaves.
    """

    def __init__(self, groups: Sequence[Group], own: Source | None = None) -> None:
        self.ledger = BlockLedger()
        self.door, self.requests = Bulkhead(), EngineRequests()
        self.producer = OfferSchedule(groups, self.ledger, self.door, self.requests)
        self.consumer = FetchSchedule(groups, own, self.ledger, self.door, self.requests)

    def commands(self) -> StepCommands:
        """Return what the workers must know with this step."""
        produced, consumed = self.producer.commands(), self.consumer.commands()
        return StepCommands(produced.offers, produced.revokes, consumed.fetches, consumed.cancels)

    @property
    def untold(self) -> bool:
        """Whether the workers, or producers, have yet to be told something."""
        return self.producer.untold or self.consumer.untold

    def __len__(self) -> int:
        """Return how many transfers both halves remember."""
        return len(self.producer) + len(self.consumer)
