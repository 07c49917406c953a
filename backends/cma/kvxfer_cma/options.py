"""What a user can set in ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import BackendOptions


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``cma``.

    Attributes:
        mode: `vm` copies directly between the processes (cross-memory attach), `shm` through shared memory, with one more copy. `auto`
            takes `vm` for each link for which the kernel permits it, and `shm` for others.
        allow_ptrace: Whether every process of this user may attach to this one (`PR_SET_PTRACER`), where Yama (`ptrace_scope`)
            would permit only its parents.
        threads: Threads that share a batch of 8 MiB or more.
    """

    backend = "cma"

    mode: Literal["auto", "vm", "shm"] = "auto"
    allow_ptrace: bool = False
    threads: Annotated[int, Meta(ge=1, le=64)] = 2
