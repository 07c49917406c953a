"""What ``kvxfer doctor`` says about this back end."""

from __future__ import annotations

import os
from importlib.metadata import version

from kvxfer.errors import TransportError
from kvxfer.transport import Probe
from kvxfer_cuda_ipc import driver

__all__ = ["probe"]


def probe() -> Probe:
    """Looks at driver, compiler and GPUs; makes no context."""
    try:
        count = driver.devices()
        if not count:
            return Probe(False, "this process sees no GPU")
        driver.nvrtc()
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
    api = driver.driver()
    apart = []
    for a in range(count):
        for b in range(count):
            if a != b and not driver.check("asking for peer access", api.cuDeviceCanAccessPeer(a, b)):
                apart.append(f"{a}->{b}")
    return f"missing: {', '.join(apart)}" if apart else "between all"
