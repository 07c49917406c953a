"""kvxfer: move the KV cache of a request from the engine that prefilled it to the engine that decodes it.

What an engine needs is here; what a back end's author needs is in ``kvxfer.transport`` and ``kvxfer.testing``.
Importing this loads no engine, no CUDA and no back end.
"""

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.control.events import readable
from kvxfer.errors import ArgumentError, ConfigError, KvxferError, PeerError, TransportError
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.geometry import Cache
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Ended, Event, GenerationReleased, Progress, Released
from kvxfer.ticket import Ticket
from kvxfer.values import BlockTable, Fetch, Group, Offer, Rank

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "ArgumentError",
    "BlockTable",
    "Cache",
    "Config",
    "ConfigError",
    "Directory",
    "Ended",
    "Event",
    "Failure",
    "FailureKind",
    "Fetch",
    "GenerationReleased",
    "Group",
    "KvxferError",
    "Offer",
    "Outcome",
    "PeerError",
    "Progress",
    "Rank",
    "Released",
    "Source",
    "Ticket",
    "TransferId",
    "TransportError",
    "readable",
]
