"""What to move: follows an engine's scheduler and tells its workers. Pure: no I/O, no clock, no engine."""

from collections.abc import Sequence

from kvxfer.identity import Source
from kvxfer.schedule.commands import (
    NULL,
    Cancel,
    Group,
    Offer,
    Release,
    Revoke,
    ScheduleError,
    StepCommands,
    Table,
    Want,
)
from kvxfer.schedule.consumer import Intake
from kvxfer.schedule.producer import PrefillTracker
from kvxfer.schedule.quorum import Quorum

__all__ = [
    "NULL",
    "Cancel",
    "Group",
    "Intake",
    "Offer",
    "PrefillTracker",
    "Quorum",
    "Release",
    "Revoke",
    "Schedule",
    "ScheduleError",
    "StepCommands",
    "Table",
    "Want",
]


class Schedule:
    """Both scheduler halves of one engine, whichever of them its requests use.

    producer: follows the requests that are prefilled here for others; consumer: those that load from others.
    One request may be both (a turn that loads its past and offers what it adds to it).

    Args:
        groups: the engine's KV-cache groups, in the order of its block tables.
        own: the engine's own address.
    """

    def __init__(self, groups: Sequence[Group], own: Source | None = None) -> None:
        self.producer = PrefillTracker(groups)
        self.consumer = Intake(groups, own)

    def preempt(self, request: str) -> None:
        """The engine takes the request's blocks away; before the `producer.step` calls of the same step."""
        self.producer.preempt(request)
        self.consumer.preempt(request)

    def finish(self, request: str, table: Sequence[Sequence[int]], complete: bool) -> bool:
        """The request is over; see `PrefillTracker.finish` for the arguments and the result."""
        self.consumer.finish(request)
        return self.producer.finish(request, table, complete)

    def commands(self) -> StepCommands:
        """What the workers must know with this step."""
        produced, consumed = self.producer.commands(), self.consumer.commands()
        return StepCommands(produced.offers, produced.revokes, consumed.wants, consumed.cancels)

    def __len__(self) -> int:
        """Transfers remembered by either half."""
        return len(self.producer) + len(self.consumer)
