"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.listening import ListenOptions, Period

__all__ = ["Options"]


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set; ``listen`` and ``port`` are for the small connections that accompany links.

    Attributes:
        channels: Thread blocks (NCCL: CTAs) that one message may use, on both GPUs. More move faster, take more device memory and more
            from the model's kernels. Of two sides that differ, the fewer.
        priority: Of the stream that transfers run on; ``normal`` is the lowest that CUDA has.
        idle_close_s: Seconds without a transfer after which a communicator is closed, which gives its memory back.
        init_timeout_s: Seconds that the making of a communicator may take.
        abort_timeout_s: Seconds that NCCL gets to abort one, before its memory counts as still in use.
        connect_timeout_s: Seconds until a link that is not yet made counts as failed.
    """

    backend = "nccl"

    channels: Annotated[int, Meta(ge=1, le=32)] = 24
    priority: Literal["normal", "high"] = "normal"
    idle_close_s: Period = 10.0
    init_timeout_s: Period = 30.0
    abort_timeout_s: Period = 5.0
    connect_timeout_s: Period = 10.0
