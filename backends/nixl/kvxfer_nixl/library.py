"""NIXL's compiled module: found, loaded without a trace, its plugins, and its errors in words.

The compiled module is used, and not the Python class around it (``nixl._api.nixl_agent``), for two reasons. That class
fixes the progress thread's delay at zero, so that the thread spins; and importing it the usual way reconfigures
``logging`` for the whole process, which closes the host application's log files.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import logging
import logging.config
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvxfer.errors import TransportError
from kvxfer.logs import logger

SYSTEM_LIBNL = "libnl-route-3.so.200"

PIP_LINE = "in a checkout: pip install ./backends/nixl (install torch first: NIXL asks for it, and for any build of it)"

_MEANINGS = {
    "nixlRemoteDisconnectError": "the peer died or closed its end, or the connection to it broke",
    "nixlNotFoundError": "NIXL does not know the peer or the memory any more: the connection has failed before",
    "nixlBackendError": "the plugin failed; NIXL wrote the reason to stderr",
    "nixlMismatchError": "these are not the metadata of a NIXL agent, or of one of another version",
    "nixlNotAllowedError": "an agent is connected already, with other metadata",
    "nixlInvalidParamError": "NIXL refused the arguments; it wrote the reason to stderr",
    "nixlNotSupportedError": "the plugin cannot do that",
    "nixlRepostActiveError": "the transfer is still active",
    "nixlNotPostedError": "the transfer was not posted",
    "nixlCancelledError": "the transfer was cancelled",
}


@dataclass(frozen=True)
class Library:
    """``bindings``: NIXL's compiled module. ``errors``: everything it raises; its classes have no common base."""

    bindings: Any
    errors: tuple[type[Exception], ...]

    @property
    def package(self) -> str:
        """The wheel's package, which says for what it was built: ``nixl_cu12``, ``nixl_cu13``."""
        return str(self.bindings.__name__).partition(".")[0]

    @cached_property
    def version(self) -> str:
        for name in (self.package.replace("_", "-"), "nixl"):
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return "of unknown version"

    @property
    def ucp(self) -> Path | None:
        """The UCX library that came in the wheel."""
        return next((self._site / f"{self.package}.libs").glob("libucp-*"), None)

    @property
    def ucx_version(self) -> str:
        if self.ucp is None:
            return "not from the wheel"
        get = ctypes.CDLL(str(self.ucp)).ucp_get_version_string
        get.restype = ctypes.c_char_p
        return str(get().decode())

    def explain(self, error: Exception) -> str:
        meaning = _MEANINGS.get(type(error).__name__)
        return f"{meaning} ({error})" if meaning else f"NIXL raised {type(error).__name__}: {error}"

    def why_unloadable(self, plugin: str) -> str:
        """Return what the dynamic linker says of a plugin that is there but cannot be loaded."""
        path = self._site / f".{self.package}.mesonpy.libs" / "plugins" / f"libplugin_{plugin}.so"
        try:
            ctypes.CDLL(str(path))
        except OSError as e:
            return str(e)
        return "NIXL wrote the reason to stderr"

    @property
    def _site(self) -> Path:
        return Path(self.bindings.__file__).parents[1]


def load(log_level: str | None = None) -> Library:
    """Load NIXL. Its log's level counts at the first load only.

    Raises:
        TransportError: It is missing; the message has the pip line.
    """
    loaded = sys.modules.get("nixl._bindings")
    if loaded is not None and log_level is not None:
        logger("kvxfer.nixl").info("NIXL is loaded already; its log level stays as it is")
    _bind_system_libnl()
    with _unnoticed(log_level):
        try:
            import nixl

            bindings = nixl._bindings
        except (ImportError, AttributeError) as e:
            raise TransportError(f"back end 'nixl' needs NIXL 1.5, which cannot be imported ({e}); {PIP_LINE}") from e
    own = [c for n, c in vars(bindings).items() if n.startswith("nixl") and n.endswith("Error")]
    return Library(bindings, (*own, RuntimeError, ValueError))


def _bind_system_libnl() -> None:
    """Bind the system's libnl to itself, if there is one, before NIXL loads the copy of libnl in its wheel.

    Where the system has libibverbs, UCX loads a module that needs the system's libefa, and so the system's libnl. By then the
    wheel's libnl is visible to all libraries of the process. The system's libnl would call its functions, and the process would
    end with SIGSEGV in a destructor of the two.
    """
    with suppress(OSError):
        ctypes.CDLL(SYSTEM_LIBNL, mode=os.RTLD_NOW | os.RTLD_LOCAL)


@contextmanager
def _unnoticed(log_level: str | None) -> Iterator[None]:
    """Undo what importing NIXL does to the process, spare it a needless torch, and let it read a log level meanwhile."""
    configure, raising, level = logging.config.dictConfig, logging.raiseExceptions, os.environ.get("NIXL_LOG_LEVEL")
    # It would close every handler there is: a file opened with mode "w" then gets nothing more.
    logging.config.dictConfig = lambda config: None
    if log_level is not None:
        os.environ["NIXL_LOG_LEVEL"] = log_level
    meta = _meta()
    detect = getattr(meta, "detect_cuda_major", None)
    if detect is not None and _torch_knows_no_cuda():
        meta.detect_cuda_major = lambda: None
    try:
        yield
    finally:
        if detect is not None:
            meta.detect_cuda_major = detect
        logging.config.dictConfig, logging.raiseExceptions = configure, raising
        if level is not None:
            os.environ["NIXL_LOG_LEVEL"] = level
        elif log_level is not None:
            os.environ.pop("NIXL_LOG_LEVEL", None)


def _meta() -> Any:
    """Return the module by which NIXL finds out for which CUDA it shall be, or None."""
    try:
        return importlib.import_module("nixl_meta_utils")
    except ImportError:
        return None


def _torch_knows_no_cuda() -> bool:
    """Whether NIXL would import a torch that is built for CPUs, which takes a second, to ask it for its CUDA.

    It asks another library that is imported first; and a torch built for CUDA has it in a file, which NIXL reads.
    """
    if not {"torch", "cuda.bindings", "cupy"}.isdisjoint(sys.modules):
        return False
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def has_gpu() -> bool:
    """Whether this machine has one that a process may open."""
    return any(glob.glob(device) for device in ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"))
