"""The contract between kvxfer and whatever moves the bytes, and the registry of back ends."""

from kvxfer.transport.contract import (
    CONTRACT_VERSION,
    Batch,
    Capabilities,
    Completion,
    Fence,
    PlanBatch,
    Probe,
    Transport,
    Verb,
)
from kvxfer.transport.registry import available, load

__all__ = [
    "CONTRACT_VERSION",
    "Batch",
    "Capabilities",
    "Completion",
    "Fence",
    "PlanBatch",
    "Probe",
    "Transport",
    "Verb",
    "available",
    "load",
]
