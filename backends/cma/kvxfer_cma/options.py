"""What a user can set in ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import BackendOptions

__all__ = ["Options"]


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set.

    Attributes:
        mode: ``vm`` copies straight between the processes, ``shm`` through shared memory (one more copy), ``auto`` takes ``vm`` where
            the kernel permits it and ``shm`` elsewhere, for each link.
        allow_ptrace: Let every process of this user access this one's memory, where Yama would only let parents.
        threads: How many copy a large batch at the same time, straight between the processes.
    """

    backend = "cma"

    mode: Literal["auto", "vm", "shm"] = "auto"
    allow_ptrace: bool = False
    threads: Annotated[int, Meta(ge=1, le=64)] = 2
