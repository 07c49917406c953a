"""Options of a back end, as a user writes them, and those of back ends that listen on a port that peers dial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import msgspec
from msgspec import Meta, Struct

from kvxfer.settings import bare, check_dialable, read, told_address

__all__ = ["BackendOptions", "ListenOptions", "Period"]


class BackendOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class for the options of a back end; a subclass must give every option a default.

    Where ``listen`` and ``advertise`` are options, they hold IPv6 addresses without brackets, however they were written.

    Attributes:
        backend: The back end's name, for messages.
    """

    backend: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("listen", "advertise"):
            value = getattr(self, name, None)
            if isinstance(value, str):
                msgspec.structs.force_setattr(self, name, bare(value))

    @classmethod
    def naming(cls) -> str:
        """Return how messages name an option, with ``{!r}`` where its name goes."""
        return f"option {{!r}} of back end {cls.backend!r}"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Read the options of a configuration.

        Raises:
            ConfigError: An option is unknown (the message names the nearest one), or a value is bad.
        """
        return read(cls, options, cls.naming())


Period = Annotated[float, Meta(gt=0, le=3600, title="seconds")]
"""A time, bounded so that every wait ends."""


class ListenOptions(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class for the options of a back end that listens; a subclass must give every option a default.

    Attributes:
        listen: Address to bind to, which peers must be able to reach. Unset, the engine's.
        advertise: Address that peers get, or a name that is looked up here. Unset, the engine's, or the `listen` set here.
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
            told = told_address(parsed.listen, parsed.advertise, cls.naming())
            msgspec.structs.force_setattr(parsed, "advertise", told)
        return parsed
