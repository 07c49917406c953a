"""What a user can set in ``backend_options``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvxfer.errors import ConfigError

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``mode``: ``vm`` copies straight between the processes, ``shm`` through shared memory (one more copy), ``auto``
    takes ``vm`` where the kernel permits it and ``shm`` elsewhere, for each link.
    ``allow_ptrace``: let every process of this user access this one's memory, where Yama would only let parents.
    """

    mode: Literal["auto", "vm", "shm"] = "auto"
    allow_ptrace: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Raises ``ConfigError``."""
        for key in options:
            if key not in cls.__struct_fields__:
                near = difflib.get_close_matches(str(key), cls.__struct_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(cls.__struct_fields__)}"
                raise ConfigError(f"the cma back end has no option {key!r}: {hint}")
        try:
            return msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as e:
            raise ConfigError(f"a cma back-end option is wrong: {e}") from None
