"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import ListenOptions, Period


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``nccl``; ``listen`` and ``port`` are for the small connections that accompany links.

    Attributes:
        channels: How many thread blocks (NCCL: CTAs) one message may use, on both GPUs. More are faster, but take more device
            memory and slow down the model's kernels more. If the sides differ, the smaller number is used.
        priority: The priority of the stream that transfers run on; ``normal`` is the lowest that CUDA has.
        idle_close_s: Seconds without a transfer after which a communicator is closed to free its memory.
        init_timeout_s: The most seconds that making a communicator may take.
        abort_timeout_s: The most seconds for NCCL to abort a communicator, before its memory counts as still in use; and the most
            that ``close`` takes, of which half may be spent on peers with which a communicator is being made.
        connect_timeout_s: Seconds after which a link that is not made yet counts as failed.
    """

    backend = "nccl"

    channels: Annotated[int, Meta(ge=1, le=32)] = 24
    priority: Literal["normal", "high"] = "normal"
    idle_close_s: Period = 10.0
    init_timeout_s: Period = 30.0
    abort_timeout_s: Period = 5.0
    connect_timeout_s: Period = 10.0
