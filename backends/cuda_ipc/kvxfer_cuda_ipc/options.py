"""What a user can set in ``backend_options``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvxfer.settings import read

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``engine``.

    ``kernel`` copies with a kernel on ``ctas`` blocks of 1024 threads, each of which keeps a multiprocessor busy while
    it lasts; ``copy`` leaves it to the GPU's copy engines, which cost no multiprocessor and much time for each run.
    """

    engine: Literal["kernel", "copy"] = "kernel"
    ctas: Annotated[int, Meta(ge=1, le=1024)] = 12

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Read the options of a configuration.

        Raises:
            ConfigError: An option is unknown (the message names the nearest one), or a value is bad.
        """
        return read(cls, options, "option {!r} of back end 'cuda_ipc'")
