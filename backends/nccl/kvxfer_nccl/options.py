"""What a user may write into ``backend_options``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvxfer.settings import check_dialable, read

__all__ = ["Options"]

Seconds = Annotated[float, Meta(gt=0, le=3600)]
NonEmpty = Annotated[str, Meta(min_length=1)]

NAMING = "option {!r} of back end 'nccl'"


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attributes: channels: thread blocks (NCCL: CTAs) that one message may use, on both GPUs.

    More move faster, take more device memory and more from the model's kernels. Of two sides that differ, the fewer.
    priority: of the stream that transfers run on; ``normal`` is the lowest that CUDA has. idle_close_s: seconds without
    a transfer after which a communicator is closed, which gives its memory back. init_timeout_s: seconds that the
    making of a communicator may take. abort_timeout_s: seconds that NCCL gets to abort one, before its memory counts as
    still in use. connect_timeout_s: seconds until a link that is not yet made counts as failed. listen: address on
    which this side takes the small connections that accompany links. advertise: host name or address given to peers, if
    it is not ``listen``. port: TCP port to listen on; 0 takes any free one.
    """

    channels: Annotated[int, Meta(ge=1, le=32)] = 24
    priority: Literal["normal", "high"] = "normal"
    idle_close_s: Seconds = 10.0
    init_timeout_s: Seconds = 30.0
    abort_timeout_s: Seconds = 5.0
    connect_timeout_s: Seconds = 10.0
    listen: NonEmpty = "127.0.0.1"
    advertise: NonEmpty | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] = 0

    @property
    def host(self) -> str:
        """Where peers find this side."""
        return self.advertise or self.listen

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Read the options of a configuration.

        Raises:
            ConfigError: an option is unknown (the message names the nearest one), or a value is bad.
        """
        parsed = read(cls, options, NAMING)
        check_dialable(parsed.listen, parsed.advertise, NAMING)
        return parsed
