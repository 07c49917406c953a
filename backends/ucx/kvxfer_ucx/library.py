"""Load ucxx, without what its import leaves behind in the environment, and only when it is needed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvxfer.errors import TransportError

PIP_LINE = "in a checkout: pip install './backends/ucx[cu12]' (or [cu13]; either works without a GPU)"

NO_RDMA = (
    "the UCX of the wheels libucx-cu12 and libucx-cu13 is built without RDMA, so it has only TCP: install a UCX with verbs, and set "
    "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
)


def prefers_system() -> bool:
    """Return whether a UCX of the host is used instead of that of the wheels."""
    return os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"


@dataclass(frozen=True)
class Library:
    """``ucxx``: its synchronous layer (``ucxx.libucxx``).

    ``array``: what wraps a buffer for it. ``ucp``: the C library below it.
    """

    ucxx: Any
    array: Any
    ucp: ctypes.CDLL
    versions: dict[str, str]


@cache
def load() -> Library:
    """Load ucxx and its UCX.

    Raises:
        TransportError: There is no ucxx (the message has the pip line), or its UCX is one that we do not know.
    """
    with _environment_kept():
        # Read once, when the library is loaded. The cache misses memory that was allocated before that, which
        # is so for every KV cache, and then takes it for host memory.
        os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
        # Or UCX complains that it was told so through Python's environment and did not see it.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            from ucxx import libucxx
            from ucxx._lib.arr import Array
        except ImportError as e:
            raise TransportError(f"back end 'ucx' needs ucxx 0.52, which cannot be imported ({e}); {PIP_LINE}") from e
    ucx: tuple[int, int, int] = libucxx.get_ucx_version()
    # The C functions of messages.py: the interface of UCX 1 only ever grew.
    if not (1, 19) <= ucx < (2,):
        raise TransportError(f"back end 'ucx' works with UCX 1.19 or later 1.x, and ucxx loaded {ucx}; {PIP_LINE}")
    # By its soname, and only if loaded already: the very library that ucxx calls.
    ucp = ctypes.CDLL("libucp.so.0", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    return Library(libucxx, Array, ucp, {"ucxx": _ucxx_version(), "ucx": ".".join(map(str, ucx))})


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo changes to ``UCX_*``: other libraries in the process (NIXL) bring a UCX that reads the same variables."""
    before = {k: v for k, v in os.environ.items() if k.startswith("UCX_")}
    try:
        yield
    finally:
        for key in [k for k in os.environ if k.startswith("UCX_") and k not in before]:
            del os.environ[key]
        os.environ.update(before)


def _ucxx_version() -> str:
    for name in ("ucxx-cu12", "ucxx-cu13", "ucxx"):
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return "unknown"
