"""What a user can set in ``backend_options``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvxfer.errors import ConfigError

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``engine``: ``kernel`` copies with a kernel on ``ctas`` blocks of 1024 threads, each of which keeps a
    multiprocessor busy while it lasts; ``copy`` leaves it to the GPU's copy engines, which cost no multiprocessor and
    much time for each run.
    """

    engine: Literal["kernel", "copy"] = "kernel"
    ctas: Annotated[int, Meta(ge=1, le=1024)] = 12

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Raises ``ConfigError``."""
        for key in options:
            if key not in cls.__struct_fields__:
                near = difflib.get_close_matches(str(key), cls.__struct_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(cls.__struct_fields__)}"
                raise ConfigError(f"the cuda_ipc back end has no option {key!r}: {hint}")
        try:
            return msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as e:
            raise ConfigError(f"a cuda_ipc back-end option is wrong: {e}") from None
