"""What a user may write into ``backend_options``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvxfer.errors import ConfigError

__all__ = ["Options"]

Seconds = Annotated[float, Meta(gt=0, le=3600)]
NonEmpty = Annotated[str, Meta(min_length=1)]

WILDCARDS = frozenset({"0.0.0.0", "::", "*"})


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attributes:
    channels: thread blocks (NCCL: CTAs) that one message may use, on both GPUs; more move faster, take more device
        memory and more from the model's kernels. Both sides should have the same.
    priority: of the stream that transfers run on; ``normal`` is the lowest that CUDA has.
    idle_close_s: seconds without a transfer after which a communicator is closed, which gives its memory back.
    init_timeout_s: seconds that the making of a communicator may take.
    abort_timeout_s: seconds that NCCL gets to abort one, before its memory counts as still in use.
    connect_timeout_s: seconds until a link that is not yet made counts as failed.
    listen: address on which this side takes the small connections that accompany links.
    advertise: host name or address given to peers, if it is not ``listen``.
    port: TCP port to listen on; 0 takes any free one.
    """

    channels: Annotated[int, Meta(ge=1, le=32)] = 16
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
        """Raises ``ConfigError`` for an unknown option (naming the nearest one) and for a bad value."""
        for key in options:
            if key not in cls.__struct_fields__:
                near = get_close_matches(str(key), cls.__struct_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(cls.__struct_fields__)}"
                raise ConfigError(f"unknown option {key!r} of back end 'nccl': {hint}")
        try:
            parsed = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as e:
            raise ConfigError(f"bad option of back end 'nccl': {e}") from None
        if parsed.listen in WILDCARDS and parsed.advertise is None:
            raise ConfigError(
                f"back end 'nccl' listens on {parsed.listen!r}, which is no address that a peer could dial; "
                "set the option 'advertise' to this host's name or address"
            )
        return parsed
