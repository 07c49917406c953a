"""The properties of this host that decide which back ends work and how fast: limits, permissions, shared memory, GPUs, network cards.

And whether a device that an option names is here, and has the memory.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from kvxfer.errors import ConfigError
from kvxfer.geometry import HOST

CAP_IPC_LOCK, CAP_SYS_PTRACE = 14, 19
SMALL_SHM = 64 << 20
"""Bytes of /dev/shm in a container by default, which back ends and engines soon fill."""


def host_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return what is found below ``root``, and under ``advice`` what to change."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "nvidia_gpus": _listed(root / "proc/driver/nvidia/gpus"),
        "infiniband": _listed(root / "sys/class/infiniband"),
        "ptrace_scope": _number(root / "proc/sys/kernel/yama/ptrace_scope"),
        "cap_sys_ptrace": _capable(root / "proc/self/status", CAP_SYS_PTRACE),
        "cap_ipc_lock": _capable(root / "proc/self/status", CAP_IPC_LOCK),
        "memlock_bytes": _memlock(),
        "shm_free_bytes": _free(root / "dev/shm"),
        "gpus": [_device(root, pci) for pci in _listed(root / "proc/driver/nvidia/gpus")],
        "nics": _nics(root),
    }
    facts["advice"] = _advice(facts)
    return facts


def memory_bytes() -> int:
    """Return how many bytes of memory this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _advice(facts: dict[str, Any]) -> list[str]:
    out = []
    if (facts["ptrace_scope"] or 0) >= 2 and not facts["cap_sys_ptrace"]:
        out.append(
            f"kernel.yama.ptrace_scope is {facts['ptrace_scope']}, which keeps processes from copying each other's memory: set "
            "it to 1 or less, or give engines CAP_SYS_PTRACE"
        )
    if facts["infiniband"] and facts["memlock_bytes"] is not None and not facts["cap_ipc_lock"]:
        out.append(
            f"locked memory is limited to {facts['memlock_bytes']} bytes, but RDMA locks all memory that it moves: set ulimit "
            "-l unlimited, or LimitMEMLOCK=infinity, or give the container the capability IPC_LOCK"
        )
    free = facts["shm_free_bytes"]
    if free is not None and free < SMALL_SHM:
        out.append(
            f"/dev/shm has {free >> 20} MiB free: give containers more (--shm-size, or an emptyDir of medium Memory)"
        )
    nodes = {nic["numa_node"] for nic in facts["nics"] if nic["infiniband"] and nic["numa_node"] is not None}
    far = [
        gpu["pci"] for gpu in facts["gpus"] if nodes and gpu["numa_node"] is not None and gpu["numa_node"] not in nodes
    ]
    if far:
        out.append(
            f"GPUs {', '.join(far)} have no InfiniBand device on their NUMA node, so what they send crosses CPU sockets"
        )
    for nic in facts["nics"]:
        if nic["infiniband"] and nic["state"] != "ACTIVE":
            out.append(f"the port of {nic['name']} is {nic['state']}, not ACTIVE, so nothing can be sent over it")
    return out


def _nics(root: Path) -> list[dict[str, Any]]:
    """Return the network cards: RDMA devices first, then the kernel's interfaces that are backed by hardware."""
    out: list[dict[str, Any]] = []
    for name in _listed(root / "sys/class/infiniband"):
        card = root / "sys/class/infiniband" / name
        state = (_text(card / "ports/1/state") or "?").split(":")[-1].strip()
        rate = (_text(card / "ports/1/rate") or "").split(" ")[0]
        speed = float(rate) if rate.replace(".", "", 1).isdigit() else None
        out.append(_nic(name, True, state, speed, card))
    for name in _listed(root / "sys/class/net"):
        card = root / "sys/class/net" / name
        if (card / "device").exists():
            mbit = _number(card / "speed")
            speed = mbit / 1000 if mbit is not None and mbit > 0 else None
            out.append(_nic(name, False, _text(card / "operstate") or "?", speed, card))
    return out


def _nic(name: str, infiniband: bool, state: str, speed: float | None, card: Path) -> dict[str, Any]:
    node = _node(card / "device/numa_node")
    return {"name": name, "infiniband": infiniband, "state": state, "gbit_per_s": speed, "numa_node": node}


def _device(root: Path, pci: str) -> dict[str, Any]:
    return {"pci": pci, "numa_node": _node(root / "sys/bus/pci/devices" / pci / "numa_node")}


def _node(path: Path) -> int | None:
    """Return a NUMA node, or ``None`` where the host has only one or does not say."""
    number = _number(path)
    return None if number is None or number < 0 else number


def _listed(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(path) or "")
    return None


def _capable(status: Path, capability: int) -> bool:
    for line in (_text(status) or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def _memlock() -> int | None:
    """Return how many bytes may be locked; ``None`` for any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _free(folder: Path) -> int | None:
    try:
        held = os.statvfs(folder)
    except OSError:
        return None
    return held.f_bavail * held.f_frsize


def check_device(device: str, option: str) -> None:
    """Refuse what is not one device.

    Raises:
        BadParameter: ``device`` is neither the host nor a kind of device and a number; the message names the option.
    """
    if device != HOST and not re.fullmatch(r"\w+:\d+", device):
        raise typer.BadParameter(
            f"{device!r} is neither {HOST} nor a kind of device and a number, such as kind:0", param_hint=option
        )


def check_memory(devices: Sequence[str], nbytes: int, option: str) -> None:
    """Refuse what would need more memory than is available: the system would end some process for it.

    Args:
        devices: Where memory is needed; twice as much where one is named twice.
        nbytes: How much is needed at each.
        option: What to name in the message: the option that is too great.

    Raises:
        ConfigError: There is too little.
    """
    for device, times in Counter(devices).items():
        has = _available(device)
        if times * nbytes > has:
            raise ConfigError(
                f"{option} is too great: it takes {times * nbytes / 1e9:.4g} GB of memory of {device}, "
                f"of which {has / 1e9:.4g} GB are available"
            )


def _available(device: str) -> int:
    if device == HOST:
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        assert found is not None  # the kernel has told it since 3.14
        return int(found[1]) * 1024
    import torch

    return int(torch.get_device_module(device.partition(":")[0]).mem_get_info(device)[0])
