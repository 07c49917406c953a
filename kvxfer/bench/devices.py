"""The device that an option of the command line names."""

from __future__ import annotations

import re

import typer

from kvxfer.errors import ConfigError

__all__ = ["check_cuda", "check_device"]


def check_device(device: str, option: str) -> None:
    """Refuse what is not one device.

    Raises:
        BadParameter: ``device`` is neither ``cpu`` nor ``cuda:N``; the message names the option.
    """
    if not re.fullmatch(r"cpu|cuda:\d+", device):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda:N", param_hint=option)


def check_cuda(device: str, option: str) -> None:
    """Refuse a CUDA device that torch does not find here.

    Raises:
        ConfigError: There is none; the message names the option.
    """
    if device == "cpu":
        return
    import torch  # here, since doctor needs none

    count, index = torch.cuda.device_count(), int(device.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError(
            f"{option} {device}: torch finds {f'{count} CUDA devices' if count else 'no CUDA device'} here"
        )
