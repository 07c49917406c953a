"""Options of back ends that listen on a port that peers dial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from msgspec import Meta

from kvxfer.backend.options import BackendOptions
from kvxfer.settings import check_dialable

__all__ = ["ListenOptions", "Period"]

Period = Annotated[float, Meta(gt=0, le=3600)]
"""A time in seconds."""


class ListenOptions(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class for the options of a back end that listens; a subclass must give every option a default.

    Attributes:
        listen: Address to bind to; peers must be able to reach it.
        advertise: Host name or address given to peers, if it is not ``listen``.
        port: TCP port to bind to; 0 takes any free one.
    """

    listen: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    advertise: Annotated[str, Meta(min_length=1)] | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] = 0

    @property
    def host(self) -> str:
        """Where peers find this side."""
        return self.advertise or self.listen

    @property
    def dialled(self) -> bool:
        """Whether peers dial ``host``."""
        return True

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        parsed = super().parse(options)
        if parsed.dialled:
            check_dialable(parsed.listen, parsed.advertise, cls.naming())
        return parsed
