"""The options a user may give this back end, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from kvxfer.backend.options import BackendOptions
from kvxfer.errors import ConfigError
from kvxfer.settings import everywhere

__all__ = ["Options"]


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``mooncake``. There is no ``listen``, because Mooncake always binds to all addresses.

    Attributes:
        advertise: This host's address or name, by which peers reach Mooncake's ports here.
        protocol: How Mooncake moves the bytes: ``tcp``, even if there are RDMA devices; or ``rdma``, over the devices that it finds.
    """

    backend = "mooncake"

    advertise: Annotated[str, Meta(min_length=1, max_length=253)] = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        parsed = super().parse(options)
        if everywhere(parsed.advertise):
            raise ConfigError(
                f"{cls.naming().format('advertise')} is {parsed.advertise!r}, which peers cannot dial; "
                "set it to this host's name or address"
            )
        return parsed
