"""The options a user may give this back end, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvxfer.errors import ConfigError
from kvxfer.settings import everywhere, read

__all__ = ["Options"]


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``mooncake``. There is no ``listen``: Mooncake binds to all addresses, whatever it is told.

    Attributes:
        advertise: This host's address or name, by which peers reach Mooncake's ports here.
        protocol: How Mooncake moves the bytes. ``tcp``, also where there are RDMA cards; or ``rdma``, over those that it finds.
    """

    advertise: Annotated[str, Meta(min_length=1, max_length=253)] = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Read the options of a configuration.

        Raises:
            ConfigError: An option is unknown (the message names the nearest one), or a value is bad.
        """
        naming = "option {!r} of back end 'mooncake'"
        parsed = read(cls, options, naming)
        if everywhere(parsed.advertise):
            raise ConfigError(
                f"{naming.format('advertise')} is {parsed.advertise!r}, which is no address that a peer could dial; "
                "set it to this host's name or address"
            )
        return parsed
