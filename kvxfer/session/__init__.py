"""Who moves a transfer and how it ends: agents, directories, messages, and the state machines between them."""

from kvxfer.session.agent import Agent
from kvxfer.session.directory import Directory
from kvxfer.session.messages import Card, Member, Named, Renew, Settle
from kvxfer.session.values import Ended, Event, Fetch, Kind, Offered, Outcome, Released, Stats

__all__ = [
    "Agent",
    "Card",
    "Directory",
    "Ended",
    "Event",
    "Fetch",
    "Kind",
    "Member",
    "Named",
    "Offered",
    "Outcome",
    "Released",
    "Renew",
    "Settle",
    "Stats",
]
