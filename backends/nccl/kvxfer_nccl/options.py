"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import ListenOptions, Period


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``nccl``; ``listen`` and ``port`` are for the small connections that accompany links.

    Attributes:
        channels: Thread blocks (NCCL: CTAs) that one message may use on each GPU. More are faster, but take more device memory and
            multiprocessors. If the sides differ, the smaller number is used.
        priority: Priority of the stream that transfers run on; `normal` is the lowest that CUDA has, `high` the next.
        idle_close_s: Time without a transfer after which a communicator is closed to free its memory.
        init_timeout_s: Time that making a communicator may take.
        abort_timeout_s: Time for NCCL to abort a communicator, after which its memory counts as still in use; and the longest that
            closing takes, of which half may pass for peers with which a communicator is being made.
        connect_timeout_s: Time after which a link that is not made yet counts as failed.
    """

    backend = "nccl"

    channels: Annotated[int, Meta(ge=1, le=32)] = 24
    priority: Literal["normal", "high"] = "normal"
    idle_close_s: Period = 10.0
    init_timeout_s: Period = 30.0
    abort_timeout_s: Period = 5.0
    connect_timeout_s: Period = 10.0
