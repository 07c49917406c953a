"""What to move and when: follows an engine's scheduler and tells its workers. Pure: no I/O, no clock, no engine."""

from kvxfer.schedule.commands import (
    NULL,
    Cancel,
    Group,
    Offer,
    Release,
    Revoke,
    ScheduleError,
    Source,
    StepCommands,
    Table,
    Want,
)
from kvxfer.schedule.consumer import Intake
from kvxfer.schedule.producer import PrefillTracker

__all__ = [
    "NULL",
    "Cancel",
    "Group",
    "Intake",
    "Offer",
    "PrefillTracker",
    "Release",
    "Revoke",
    "ScheduleError",
    "Source",
    "StepCommands",
    "Table",
    "Want",
]
