"""Who moves a transfer and how it ends: agents, directories, messages, and the state machines between them."""

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.session.agent import Agent
from kvxfer.session.directory import Directory
from kvxfer.session.messages import Card, Decline, Member, Named, Renew
from kvxfer.session.values import Ended, Event, Released, Stats

__all__ = [
    "Agent",
    "Card",
    "Decline",
    "Directory",
    "Ended",
    "Event",
    "Failure",
    "FailureKind",
    "Member",
    "Named",
    "Outcome",
    "Released",
    "Renew",
    "Stats",
]
