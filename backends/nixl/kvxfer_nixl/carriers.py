"""Those of UCX's transports that reach memory without the help of the process whose it is, and which of them a setting allows."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Set
from functools import cache

HOST = frozenset({"cma", "cuda_ipc"})
NETWORK = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5"})
GROUPS = {
    "all": HOST | NETWORK,
    "sm": {"cma"},
    "shm": {"cma"},
    "cuda": {"cuda_ipc"},
    "ib": NETWORK,
    "rc": {"rc_verbs", "rc_mlx5"},
    "rc_v": {"rc_verbs"},
    "rc_x": {"rc_mlx5"},
    "dc": {"dc_mlx5"},
    "dc_x": {"dc_mlx5"},
}
"""What UCX reads with by itself, and its names for several of them at once."""


def in_force(settings: Mapping[str, str], name: str) -> str:
    """Return what UCX goes by for ``TLS`` or ``NET_DEVICES``: what it is given, or else the environment."""
    return settings.get(name) or os.environ.get(f"UCX_{name}") or "all"


def allowed_by(setting: str, there: Set[str]) -> Set[str]:
    """Return what a list as UCX reads it (``rc,cuda``, ``^tcp``, ``mlx5_0:1``) allows of what is there."""
    named: set[str] = set()
    for item in setting.removeprefix("^").split(","):
        name = item.strip().lstrip("\\").partition(":")[0]
        named |= there if name == "all" else GROUPS.get(name, {name})
    return there - named if setting.startswith("^") else there & named


def copies_directly(carriers: str) -> bool:
    """Return whether UCX copies between processes of this host by itself, with this setting of ``TLS``."""
    return bool(allowed_by(carriers, {"cma"})) and _kernel_copies()


@cache
def _kernel_copies() -> bool:
    """Return whether the kernel offers CMA, which some containers forbid; UCX then does without, whatever it is told."""
    return bool(ctypes.CDLL(None).process_vm_readv(os.getpid(), None, 0, None, 0, 0) == 0)
