"""What a user can set in ``backend_options``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvxfer.settings import read

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``mode``.

    ``vm`` copies straight between the processes, ``shm`` through shared memory (one more copy), ``auto`` takes ``vm``
    where the kernel permits it and ``shm`` elsewhere, for each link. ``allow_ptrace``: let every process of this user
    access this one's memory, where Yama would only let parents. ``threads``: how many copy a large batch at the same
    time, straight between the processes.
    """

    mode: Literal["auto", "vm", "shm"] = "auto"
    allow_ptrace: bool = False
    threads: Annotated[int, Meta(ge=1, le=64)] = 2

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Read the options of a configuration.

        Raises:
            ConfigError: An option is unknown (the message names the nearest one), or a value is bad.
        """
        return read(cls, options, "option {!r} of back end 'cma'")
