"""kvxfer: move the KV cache of a request from the engine that prefilled it to the engine that decodes it.

Everything an engine needs is here; authors of back ends also need ``kvxfer.transport``, ``kvxfer.backend`` and
``kvxfer.testing``. The import itself is cheap: each name is loaded on first use, and none loads an engine, CUDA or a back end.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.config import Config
    from kvxfer.control.agent import Agent
    from kvxfer.control.directory import Directory
    from kvxfer.control.events import readable
    from kvxfer.errors import ArgumentError, ClosedError, ConfigError, KvxferError, PeerError, TransportError
    from kvxfer.facts import sealed
    from kvxfer.failures import Failure, FailureKind, Outcome
    from kvxfer.geometry import Cache
    from kvxfer.identity import Generation, Handle, Source, TransferId, digest
    from kvxfer.protocol.values import Ended, Event, GenerationReleased, Released
    from kvxfer.ticket import Ticket
    from kvxfer.values import BlockTable, Fetch, Group, Offer, Rank

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "ArgumentError",
    "BlockTable",
    "Cache",
    "ClosedError",
    "Config",
    "ConfigError",
    "Directory",
    "Ended",
    "Event",
    "Failure",
    "FailureKind",
    "Fetch",
    "Generation",
    "GenerationReleased",
    "Group",
    "Handle",
    "KvxferError",
    "Offer",
    "Outcome",
    "PeerError",
    "Rank",
    "Released",
    "Source",
    "Ticket",
    "TransferId",
    "TransportError",
    "digest",
    "readable",
    "sealed",
]

_HOMES = {
    "kvxfer.config": ("Config",),
    "kvxfer.control.agent": ("Agent",),
    "kvxfer.control.directory": ("Directory",),
    "kvxfer.control.events": ("readable",),
    "kvxfer.errors": ("ArgumentError", "ClosedError", "ConfigError", "KvxferError", "PeerError", "TransportError"),
    "kvxfer.failures": ("Failure", "FailureKind", "Outcome"),
    "kvxfer.facts": ("sealed",),
    "kvxfer.geometry": ("Cache",),
    "kvxfer.identity": ("Generation", "Handle", "Source", "TransferId", "digest"),
    "kvxfer.protocol.values": ("Ended", "Event", "GenerationReleased", "Released"),
    "kvxfer.ticket": ("Ticket",),
    "kvxfer.values": ("BlockTable", "Fetch", "Group", "Offer", "Rank"),
}
"""The names that each module defines; the imports above tell type checkers the same."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(home), name)
            globals()[name] = value  # so that __getattr__ runs only once for each name
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
