"""The contract between kvxfer and the back ends that move the bytes, and the registry that finds back ends."""

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
