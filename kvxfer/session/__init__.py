"""Who moves a transfer and how it ends: agents, directories, messages, and the state machines between them."""

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.session.agent import Agent
from kvxfer.session.directory import Directory
from kvxfer.session.messages import Card, Member, Named, Renew, Settle
from kvxfer.session.values import Ended, Event, Fetch, Offered, Released, Stats

__all__ = [
    "Agent",
    "Card",
    "Directory",
    "Ended",
    "Event",
    "Failure",
    "FailureKind",
    "Fetch",
    "Member",
    "Named",
    "Offered",
    "Outcome",
    "Released",
    "Renew",
    "Settle",
    "Stats",
]
