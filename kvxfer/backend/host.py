"""Where a process runs, for back ends that reach others of its host."""

from __future__ import annotations

import glob
import os
from pathlib import Path

__all__ = ["has_gpu", "host", "network_namespace", "pid_namespace"]


def host() -> str:
    """Return the running kernel's boot id: the same in all containers of a host, different on every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def has_gpu() -> bool:
    """Whether there is one that a process may open."""
    return any(glob.glob(device) for device in ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"))


def network_namespace() -> int:
    """Inode of the network namespace: abstract Unix sockets are found only within one."""
    return os.stat("/proc/self/ns/net").st_ino


def pid_namespace() -> int:
    """Inode of the pid namespace: process numbers mean the same thing only within one."""
    return os.stat("/proc/self/ns/pid").st_ino
