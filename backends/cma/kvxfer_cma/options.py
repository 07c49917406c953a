"""What a user can set in ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import BackendOptions


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``cma``.

    Attributes:
        mode: ``vm`` copies directly between the processes, ``shm`` through shared memory (one more copy); ``auto`` uses ``vm`` for
            each link for which the kernel permits it, and ``shm`` for others.
        allow_ptrace: Whether to let every process of this user access this one's memory if Yama (``ptrace_scope``) would only
            let its parents.
        threads: How many threads copy a large batch directly between the processes at the same time.
    """

    backend = "cma"

    mode: Literal["auto", "vm", "shm"] = "auto"
    allow_ptrace: bool = False
    threads: Annotated[int, Meta(ge=1, le=64)] = 2
