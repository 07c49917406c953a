"""Whether the kernel lets two processes of this host touch each other's memory, and why not.

``process_vm_readv`` is subject to the rules for attaching a debugger: same user and group ids on both, the target
dumpable, and what a security module adds. Yama (default on Ubuntu and others) at scope 1 adds that the target
is a child of the caller, or has named the caller with ``PR_SET_PTRACER``.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvxfer.errors import TransportError

PR_GET_DUMPABLE = 3
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
CAP_SYS_PTRACE = 19

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def allow_any() -> None:
    """Let every process that passes the other rules (same user) access this one, until it ends.

    Raises:
        TransportError: The kernel refuses.
    """
    if yama_scope() is None:
        return  # nothing forbids it
    if _prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0):
        number = ctypes.get_errno()
        raise TransportError(f"allow_ptrace: the kernel refused PR_SET_PTRACER ({os.strerror(number)})")


def yama_scope() -> int | None:
    """Yama's ``ptrace_scope``, or ``None`` where Yama is not in the kernel."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except FileNotFoundError:
        return None


def privileged() -> bool:
    """Whether this process has CAP_SYS_PTRACE, which overrides all but scope 3."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)
    return False


def facts() -> tuple[str, dict[str, str]]:
    """Return a sentence on who may read whose memory from here, and what it was concluded from."""
    scope, capable, dumpable = yama_scope(), privileged(), bool(_prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))
    found = {
        "yama ptrace_scope": "absent" if scope is None else str(scope),
        "CAP_SYS_PTRACE": "yes" if capable else "no",
        "dumpable": "yes" if dumpable else "no",
        "user": str(os.geteuid()),
        "pid namespace": os.readlink("/proc/self/ns/pid"),
    }
    if scope == 3:
        said = "Yama (ptrace_scope 3) forbids reading another process's memory: copies go through shared memory"
    elif capable:
        said = "may read the memory of every process in this pid namespace"
    elif scope == 2:
        said = "Yama (ptrace_scope 2) wants CAP_SYS_PTRACE, which is missing: copies go through shared memory"
    elif scope == 1:
        said = (
            "Yama (ptrace_scope 1) lets only parents read their children's memory: set `allow_ptrace: true` on both "
            "sides, else copies go through shared memory"
        )
    else:
        said = f"may read the memory of processes of user {os.geteuid()} in this pid namespace"
    if not dumpable and not capable:
        said += "; this process is not dumpable, so others may not read its memory"
    return said, found
