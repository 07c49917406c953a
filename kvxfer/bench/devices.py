"""The device that an option of the command line names."""

from __future__ import annotations

import re

import typer

__all__ = ["check_device"]


def check_device(device: str, option: str) -> None:
    """Refuse what is not one device.

    Raises:
        BadParameter: ``device`` is neither ``cpu`` nor ``cuda:N``; the message names the option.
    """
    if not re.fullmatch(r"cpu|cuda:\d+", device):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda:N", param_hint=option)
