"""Find the space of a kind of device: one that is installed (entry point group ``kvxfer.spaces``), ours, or torch's."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

from kvxfer.errors import ArgumentError, ConfigError, why_not_loaded
from kvxfer.geometry import HOST
from kvxfer.memory.space import SPACE_CONTRACTS, Space

__all__ = ["SPACES", "space_for", "installed", "load"]

SPACES = "kvxfer.spaces"
"""The entry point group. An entry point's name is the kind of device."""

_OURS = {HOST: "kvxfer.memory.cpu:CpuSpace", "cuda": "kvxfer.memory.cuda:CudaSpace"}
"""Used if nothing else is installed for the kind. Host memory is always ours: all others are staged there."""

_GENERIC = "kvxfer.memory.torch_space:TorchSpace"


def installed() -> dict[str, str]:
    """Return the kinds of device for which there is a space, with the ``module:Class`` of each. Imports none of them.

    Raises:
        ConfigError: Two distributions have a space for the same kind.
    """
    from importlib.metadata import entry_points  # here, because it takes long

    found: dict[str, str] = {}
    for point in entry_points(group=SPACES):
        if found.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"two spaces are installed for devices of kind {point.name!r}, {found[point.name]} and {point.value}: "
                "uninstall one of them"
            )
    return {**_OURS, **found, HOST: _OURS[HOST]}


@cache
def space_for(kind: str) -> type[Space]:
    """Return the class for a kind of device.

    Raises:
        ArgumentError: The kind is unknown.
        ConfigError: Its class cannot be loaded, or is written for another contract.
    """
    target = _OURS[HOST] if kind == HOST else installed().get(kind)
    if target is None and _torch_knows(kind):
        target = _GENERIC
    if target is None:
        known = ", ".join(map(repr, installed()))
        raise ArgumentError(
            f"device {kind!r} is not known: kvxfer has spaces for {known}, and torch knows no such device here. Install the "
            f"distribution that brings a space for {kind!r}, or write one (docs/write-a-memory-space.md)"
        )
    return load(target, f"for devices of kind {kind!r}")


def load(target: str, what: str) -> type[Space]:
    """Return this ``module:Class``.

    Raises:
        ConfigError: It cannot be loaded, or is written for another contract.
    """
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as e:  # whatever its module does when it is imported
        raise ConfigError(f"the space {what} ({target}) cannot be loaded: {why_not_loaded(e)}") from e
    if not (isinstance(cls, type) and issubclass(cls, Space)):
        raise ConfigError(f"the space {what} ({target}) is not a kvxfer.memory.Space class")
    lacking = sorted(getattr(cls, "__abstractmethods__", ()))
    if lacking:
        raise ConfigError(f"the space {what} ({target}) lacks {', '.join(lacking)}")
    contract = getattr(cls, "contract", None)
    if contract not in SPACE_CONTRACTS:
        spoken = " and ".join(map(str, sorted(SPACE_CONTRACTS)))
        raise ConfigError(
            f"the space {what} ({target}) must say for which contract it was written: its class has `contract = {contract!r}`, "
            f"and this kvxfer speaks {spoken}"
        )
    return cls


def _torch_knows(kind: str) -> bool:
    """Return whether torch has this kind of device in this process."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False
