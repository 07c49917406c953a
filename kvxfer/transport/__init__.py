"""The contract between kvxfer and whatever moves the bytes, and the registry of back ends."""

from kvxfer.transport.contract import (
    CONTRACT_VERSION,
    CONTRACTS,
    Batch,
    Capabilities,
    Completion,
    Fence,
    PlanBatch,
    Probe,
    Quieted,
    Transport,
    Verb,
)
from kvxfer.transport.registry import available, load

__all__ = [
    "CONTRACTS",
    "CONTRACT_VERSION",
    "Batch",
    "Capabilities",
    "Completion",
    "Fence",
    "PlanBatch",
    "Probe",
    "Quieted",
    "Transport",
    "Verb",
    "available",
    "load",
]
