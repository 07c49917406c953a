"""Find back ends: by entry point (group ``kvxfer.backends``) or as ``module:Class``."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from kvxfer.errors import ConfigError
from kvxfer.settings import near
from kvxfer.transport.contract import CONTRACT_VERSION, Transport

__all__ = ["GROUP", "PIP_LINES", "available", "load"]

GROUP = "kvxfer.backends"

PIP_LINES = {name: f"pip install 'kvxfer[{name}]'" for name in ("zmq", "tcp", "nixl", "ucx", "nccl", "cma", "cuda-ipc")}
"""Back ends that are published beside the core, and how a user gets them."""


def available() -> dict[str, str]:
    """Names of installed back ends and the ``module:Class`` each stands for. Imports none of them."""
    return {ep.name: ep.value for ep in sorted(entry_points(group=GROUP), key=lambda ep: ep.name)}


def load(name: str) -> type[Transport]:
    """The class of back end ``name``. Raises ``ConfigError`` when it is unknown, broken or of another contract."""
    target = name if ":" in name else available().get(name)
    if target is None:
        if name.replace("_", "-") in PIP_LINES:
            raise ConfigError(f"back end {name!r} is not installed; {PIP_LINES[name.replace('_', '-')]}")
        hint = near(name, [*available(), *PIP_LINES]) or f"installed are {', '.join(available()) or 'none'}"
        raise ConfigError(f"unknown back end {name!r}; {hint}")
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"back end {name!r} ({target}) cannot be loaded: {e}") from e
    if not (isinstance(cls, type) and issubclass(cls, Transport)):
        raise ConfigError(f"back end {name!r} ({target}) is not a kvxfer.transport.Transport class")
    contract = getattr(cls, "contract", None)
    if contract is None:
        raise ConfigError(
            f"back end {name!r} ({target}) does not say for which transport contract it was written: its class needs "
            f"`contract = N`, and this kvxfer speaks {CONTRACT_VERSION}"
        )
    if contract != CONTRACT_VERSION:
        raise ConfigError(
            f"back end {name!r} was written for transport contract {contract}, this kvxfer speaks {CONTRACT_VERSION}; "
            "install a release of it that matches"
        )
    return cls
