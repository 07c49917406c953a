"""Options of a back end, read from what a user wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from msgspec import Struct

from kvxfer.settings import read

__all__ = ["BackendOptions"]


class BackendOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Derive a back end's options from it; every one has a default.

    Attributes:
        backend: Its name, for messages.
    """

    backend: ClassVar[str]

    @classmethod
    def naming(cls) -> str:
        """Return what messages call an option, with ``{!r}`` where its name goes."""
        return f"option {{!r}} of back end {cls.backend!r}"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Read the options of a configuration.

        Raises:
            ConfigError: An option is unknown (the message names the nearest one), or a value is bad.
        """
        return read(cls, options, cls.naming())
