"""The CUDA driver and its compiler through cuda-bindings: loaded when they are needed, and calls that raise."""

from __future__ import annotations

import functools
import os
from importlib.metadata import version
from typing import Any

from kvxfer.errors import TransportError
from kvxfer.transport import Probe


class CudaError(TransportError):
    """A CUDA call failed. ``name`` is CUDA's name for it."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what}: {name}")
        self.name = name


@functools.cache
def driver() -> Any:
    """Return ``cuda.bindings.driver``, initialised.

    Raises:
        TransportError: It is not installed, or there is no driver.
    """
    try:
        from cuda.bindings import driver as found

        check("initialising CUDA", found.cuInit(0))
    except ImportError as e:
        raise TransportError(
            f"cuda-bindings is not installed ({e}): in a checkout: pip install ./backends/cuda_ipc"
        ) from e
    except RuntimeError as e:
        raise TransportError(f"there is no CUDA driver ({e})") from e
    return found


@functools.cache
def nvrtc() -> Any:
    """Return ``cuda.bindings.nvrtc``, loaded.

    Raises:
        TransportError: It is not installed, or cannot be loaded.
    """
    try:
        from cuda.bindings import nvrtc as found

        found.nvrtcVersion()
    except (ImportError, RuntimeError) as e:
        raise TransportError(
            f"the CUDA run-time compiler cannot be loaded ({e}): pip install 'cuda-bindings[all]', or nvidia-cuda-nvrtc"
        ) from e
    return found


def check(what: str, result: tuple[Any, ...]) -> Any:
    """Return the value of a call's result, if it has one.

    Raises:
        CudaError: The call has failed.
    """
    if result[0] != 0:
        raise CudaError(what, getattr(result[0], "name", str(result[0])))
    return result[1] if len(result) == 2 else result[1:]


def devices() -> int:
    """Return how many GPUs this process sees.

    Raises:
        TransportError: There is no driver.
    """
    return int(check("counting GPUs", driver().cuDeviceGetCount()))


def probe() -> Probe:
    """Look at driver, compiler and GPUs, without making a context."""
    try:
        count = devices()
        if not count:
            return Probe(False, "this process sees no GPU")
        nvrtc()
        facts = {"cuda-bindings": version("cuda-bindings"), "GPUs": str(count), "peer access": _peers(count)}
    except TransportError as e:
        return Probe(False, str(e))
    said = f"moves memory between {count} GPUs of this host, or within one"
    settings = " ".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:True" in settings:
        said += "; but memory of PyTorch's expandable segments cannot be shared, and they are switched on here"
    return Probe(True, said, frozenset({"cuda"}), facts)


def _peers(count: int) -> str:
    """Pairs of GPUs that cannot reach each other, if any."""
    api = driver()
    apart = []
    for a in range(count):
        for b in range(count):
            if a != b and not check("asking for peer access", api.cuDeviceCanAccessPeer(a, b)):
                apart.append(f"{a}->{b}")
    return f"missing: {', '.join(apart)}" if apart else "between all"
