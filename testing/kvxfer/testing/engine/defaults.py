"""What simulated engines are made with, and a wait for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvxfer.config import Config

FACTS = {"model": "simulated"}
"""What all KV of a simulated engine depends on."""

_DEFAULTS = {
    "backend": "kvxfer.testing.fake:FakeTransport",
    "transfer_timeout": 20.0,
    "peer_timeout": 20.0,
    "abort_timeout": 2.0,
    "lease": 20.0,
}


def config_of(given: Config | Mapping[str, Any] | None) -> Config:
    """Return the settings of an engine on the in-process back end, but for those that are given."""
    return given if isinstance(given, Config) else Config.from_mapping(_DEFAULTS | dict(given or {}))


def until(true: Callable[[], object], timeout: float = 60.0) -> None:
    """Wait until something is true.

    Raises:
        AssertionError: It is not, within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not so within {timeout:g} s")
        time.sleep(0.002)
