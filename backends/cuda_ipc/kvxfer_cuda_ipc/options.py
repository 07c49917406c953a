"""What a user can set in ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import BackendOptions

__all__ = ["Options"]


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set.

    Attributes:
        engine: ``kernel`` copies with a kernel, ``copy`` leaves it to the GPU's copy engines, which cost no multiprocessor and much time
            for each run.
        ctas: Blocks of 1024 threads of the kernel, each of which keeps a multiprocessor busy while it lasts.
    """

    backend = "cuda_ipc"

    engine: Literal["kernel", "copy"] = "kernel"
    ctas: Annotated[int, Meta(ge=1, le=1024)] = 12
