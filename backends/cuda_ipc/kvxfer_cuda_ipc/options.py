"""What a user can set in ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import BackendOptions


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``cuda_ipc``.

    Attributes:
        engine: `kernel` copies with a kernel. `copy` uses the GPU's copy engines (`cuMemcpyBatchAsync`), which occupy no multiprocessor
            but take much time for each run.
        ctas: Thread blocks of the kernel, of 1024 threads each; each keeps a multiprocessor busy during a copy.
    """

    backend = "cuda_ipc"

    engine: Literal["kernel", "copy"] = "kernel"
    ctas: Annotated[int, Meta(ge=1, le=1024)] = 12
