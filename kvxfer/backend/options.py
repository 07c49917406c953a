"""Options of a back end, as a user writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
from msgspec import Struct

from kvxfer.settings import bare, read

__all__ = ["BackendOptions"]


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
