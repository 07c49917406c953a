"""Where a process runs, for back ends that reach other processes of its host."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["host", "network_namespace", "pid_namespace"]


def host() -> str:
    """Return the running kernel's boot id: the same in all containers of a host, different on every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network_namespace() -> int:
    """Return the inode of the network namespace: abstract Unix sockets are found only within one."""
    return os.stat("/proc/self/ns/net").st_ino


def pid_namespace() -> int:
    """Return the inode of the pid namespace: process ids mean the same only within one."""
    return os.stat("/proc/self/ns/pid").st_ino
