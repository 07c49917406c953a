"""``backend: auto``: the back end for an engine whose operator named none.

Two engines have to come to the same answer without asking each other, so it depends only on what they share: where the
KV lies, whether peers can be on other hosts, and what is installed and works. If they differ all the same, the hello
between them is refused and names both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import ConfigError
from kvxfer.transport.registry import load

__all__ = ["AUTO", "ORDER", "Choice", "choose", "resolve"]

AUTO = "auto"

ORDER: Mapping[tuple[str, bool], tuple[str, ...]] = {
    ("cpu", True): ("cma", "zmq"),
    ("cpu", False): ("nixl", "ucx", "zmq"),
    ("cuda", True): ("cuda_ipc", "nixl", "ucx", "nccl", "zmq"),
    ("cuda", False): ("nixl", "ucx", "nccl", "zmq"),
}
"""Back ends by preference, for a memory kind and whether all peers are on this host: fewest copies first."""

_log = logging.getLogger("kvxfer.transport")


@dataclass(frozen=True)
class Choice:
    """``name``: the back end taken; ``reason``: what its probe says; ``passed``: those preferred to it that do not work
    here, and why."""

    name: str
    reason: str
    passed: Mapping[str, str]

    def __str__(self) -> str:
        passed = "".join(f"; {name} not, {why}" for name, why in self.passed.items())
        return f"{self.name} ({self.reason}){passed}"


def resolve(
    backend: str, options: Mapping[str, Any], devices: Iterable[str], one_host: bool
) -> tuple[str, Mapping[str, Any]]:
    """The name of a back end and what it gets as options: as given, or for ``AUTO`` as chosen.

    With ``AUTO``, ``options`` holds options by back end: ``{"zmq": {"listen": "0.0.0.0"}}``. ``devices``: where the KV
    lies, as ``"cpu"`` or ``"cuda:0"``. Raises ``ConfigError``.
    """
    if backend != AUTO:
        return backend, options
    known = sorted({name for order in ORDER.values() for name in order})
    for name, value in options.items():
        if name not in known or not isinstance(value, Mapping):
            raise ConfigError(
                f"with backend 'auto', backend_options holds the options of each back end under its name ({', '.join(known)}), "
                f"as in {{'zmq': {{...}}}}; it cannot hold {name!r}: {value!r}"
            )
    kinds = {device.partition(":")[0] for device in devices}
    name = choose("cuda" if "cuda" in kinds else "cpu", one_host).name
    return name, options.get(name, {})


def choose(memory: str, one_host: bool) -> Choice:
    """The first back end of ``ORDER`` that is installed and works here. Any thread; may take a second, since each is
    tried. Raises ``ConfigError`` when none does, with the reason of each."""
    order = ORDER.get((memory, one_host))
    if order is None:
        raise ConfigError(f"backend 'auto' knows no order for {memory} memory; name a back end")
    passed: dict[str, str] = {}
    for name in order:
        try:
            probe = load(name).probe()
        except ConfigError as e:
            passed[name] = str(e)
            continue
        # One that cannot reach the memory still moves it, through host memory: the last resort.
        if probe.usable and (memory in probe.memory or name == order[-1]):
            choice = Choice(name, probe.reason, passed)
            _log.info("backend auto: %s", choice)
            return choice
        passed[name] = probe.reason if not probe.usable else f"it does not move {memory} memory"
    raise ConfigError(f"backend 'auto' found none that works here: {passed}")
