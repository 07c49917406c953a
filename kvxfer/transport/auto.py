"""``backend: auto``: the back ends of an engine whose operator named none.

They come in a stated order. The first that works here is started at once; each link is then made with the first that
both engines have and that can make it, so that peers on this host are reached straight and others over a network. Of
the later ones nothing is loaded before a link asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.transport.contract import Probe
from kvxfer.transport.registry import available, load

__all__ = ["AUTO", "ORDER", "Choice", "Objection", "choose", "lineup", "options_for", "options_of"]

AUTO = "auto"

ORDER: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cma", "nixl", "ucx", "tcp", "zmq"),
    "cuda": ("cuda_ipc", "nixl", "ucx", "nccl", "zmq"),
}
"""Back ends by preference, for a memory kind: fewest copies first, and last what works everywhere."""

ALONE = frozenset({"nixl", "ucx"})
"""Of these a process has one only: each brings a UCX of its own, and with two at work progress has crashed."""

Objection = Callable[[str], str | None]
"""Why a back end, by its name, must not be used; ``None`` if it may."""

_log = logging.getLogger("kvxfer.transport")


@dataclass(frozen=True)
class Choice:
    """``name``: the back end to start with; ``reason``: what its probe says; ``passed``: those that do not work here, or must not be
    used, and why; ``others``: installed ones for links that it cannot make."""

    name: str
    reason: str
    passed: Mapping[str, str]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        passed = "".join(f"; {name} not, {why}" for name, why in self.passed.items())
        others = f"; for links that it cannot make: {', '.join(self.others)}" if self.others else ""
        return f"{self.name} ({self.reason}){passed}{others}"


def lineup(backend: str, devices: Iterable[str], objection: Objection = lambda _: None) -> tuple[str, ...]:
    """Names of the back ends that an engine may use, in order: the one that is given, or for ``AUTO`` those of
    ``ORDER``. ``devices``: where the KV lies, as ``"cpu"`` or ``"cuda:0"``. ``objection``: why this engine must not use one. Raises
    ``ConfigError``."""
    if backend != AUTO:
        if why := objection(backend):
            raise ConfigError(f"back end {backend!r} cannot be used: {why}")
        return (backend,)
    kinds = {device.partition(":")[0] for device in devices}
    choice = choose("cuda" if "cuda" in kinds else "cpu", objection=objection)
    _log.info("backend auto: %s", choice)
    return (choice.name, *choice.others)


def options_of(name: str, backend: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What of the configured options back end ``name`` gets: all of them, or with ``AUTO`` those under its name, as in
    ``{"zmq": {"listen": "0.0.0.0"}}``. Raises ``ConfigError``."""
    if backend != AUTO:
        return options
    known = sorted({name for order in ORDER.values() for name in order})
    for key, value in options.items():
        if key not in known or not isinstance(value, Mapping):
            raise ConfigError(
                f"with backend 'auto', backend_options holds the options of each back end under its name ({', '.join(known)}), "
                f"as in {{'zmq': {{...}}}}; it cannot hold {key!r}: {value!r}"
            )
    mine: Mapping[str, Any] = options.get(name, {})
    return mine


def options_for(name: str, config: Config) -> Mapping[str, Any]:
    """What a back end gets of an engine that is configured so: its own options, and of the engine's settings those that it inherits.
    Raises ``ConfigError``."""
    backend, options = load(name), options_of(name, config.backend, config.backend_options)
    if backend.inherits & options.keys():  # an address set for the back end goes with none of the engine's
        return options
    ours = {"listen": config.listen, "advertise": config.advertise or config.listen}
    return {**options, **{key: ours[key] for key in backend.inherits}}


def choose(
    memory: str, probe_of: Callable[[str], Probe | None] | None = None, objection: Objection = lambda _: None
) -> Choice:
    """The first back end of ``ORDER`` that is installed and works here, and what may stand in for it. Any thread; may
    take a second, since those up to it are tried, in this process unless ``probe_of`` knows what came of it (``None`` for
    one that is not installed). ``objection``: as of ``lineup``. Raises ``ConfigError`` when none does, with the reason of each."""
    order = ORDER.get(memory)
    if order is None:
        raise ConfigError(f"backend 'auto' knows no order for {memory} memory; name a back end")
    passed: dict[str, str] = {}
    for i, name in enumerate(order):
        try:
            if why := objection(name):
                passed[name] = why
                continue
            probe = (probe_of and probe_of(name)) or load(name).probe()
        except ConfigError as e:
            passed[name] = str(e)
            continue
        # One that cannot reach the memory still moves it, through host memory: the last resort.
        if probe.usable and (memory in probe.memory or name == order[-1]):
            others = _installed(name, order[i + 1 :], objection, passed)
            return Choice(name, probe.reason, passed, others)
        passed[name] = probe.reason if not probe.usable else f"it does not move {memory} memory"
    raise ConfigError(f"backend 'auto' found none that works here: {passed}")


def _installed(first: str, rest: tuple[str, ...], objection: Objection, passed: dict[str, str]) -> tuple[str, ...]:
    """Those of ``rest`` that are there, may be used, and go together with what comes before them."""
    there, kept = available(), [first]
    for name in rest:
        if (name in there or ":" in name) and not (name in ALONE and ALONE.intersection(kept)):
            if why := objection(name):
                passed[name] = why
            else:
                kept.append(name)
    return tuple(kept[1:])
