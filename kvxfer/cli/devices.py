"""The device that an option of the command line names, and whether its memory is enough."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer

from kvxfer.errors import ConfigError
from kvxfer.geometry import HOST


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
