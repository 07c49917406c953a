"""Settings of UCX: checked by UCX itself, and handed to it through NIXL.

NIXL takes them in one plugin parameter, ``engine_config``, which has three traps. It drops a setting that UCX refuses
without a message, it prefers the environment's value, and it cuts the text at commas, although UCX's lists are written
with commas. So UCX is asked first, and an environment that contradicts the operator's options is an error. A setting with a comma, or
of which kvxfer gives NIXL only a part, goes through the environment for the moment in which NIXL makes its UCX context.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvxfer.backend.environment import environment
from kvxfer.errors import ConfigError


def check(settings: Mapping[str, str], library: Path | None) -> None:
    """Refuse a setting of UCX that it does not take, or that the environment contradicts.

    Without NIXL's libucp (a NIXL built from source) names and values go unchecked.

    Raises:
        ConfigError: There is such a setting.
    """
    for key, value in settings.items():
        found = os.environ.get(f"UCX_{key}")
        if found is not None and found != value:
            raise ConfigError(
                f"option 'ucx' of back end 'nixl' sets {key} to {value!r}, but UCX_{key} is {found!r} in the environment, "
                "which NIXL prefers; unset one of them"
            )
    if not settings or library is None:
        return
    ucp = ctypes.CDLL(str(library))
    config = ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)) != 0:
        return  # NIXL will meet the same and say so
    try:
        for key, value in settings.items():
            if ucp.ucp_config_modify(config, key.encode(), value.encode()) != 0:
                raise ConfigError(
                    f"UCX does not take {value!r} for {key!r} (option 'ucx' of back end 'nixl'): it has no such setting, "
                    "or that is no value for it; `ucx_info -cf` lists them with the prefix UCX_"
                )
    finally:
        ucp.ucp_config_release(config)


@contextmanager
def applied(settings: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Return the plugin parameters that carry the settings, for as long as the backend is being created."""
    set_here = {k for k, v in settings.items() if "," in v or os.environ.get(f"UCX_{k}", v) != v}
    plain = [f"{k}={v}" for k, v in settings.items() if k not in set_here]
    with environment({f"UCX_{k}": settings[k] for k in set_here}):
        yield {"engine_config": ",".join(plain)} if plain else {}
