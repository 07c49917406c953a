"""``backend: auto``: choose back ends for an engine whose operator named none.

Every installed back end that declares ``Transport.costs`` is a candidate, and so is one that the operator names as
``module:Class`` in ``backend_options``. They are ordered by these costs. The first that works here is started at once;
each link is then made with the first that both engines have and that can make it, so that peers on this host are reached
directly and others over a network. The libraries of later ones are loaded only when a link needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.geometry import HOST
from kvxfer.logs import logger
from kvxfer.transport.contract import Probe, Transport
from kvxfer.transport.guard import guard
from kvxfer.transport.registry import available, called, known, load, probed

AUTO = "auto"

Backend = type[Transport]

_log = logger("kvxfer.transport")


@dataclass(frozen=True)
class Choice:
    """What ``auto`` chooses on this machine."""

    # the back end to start with, then those for links that it cannot make, in order, by their declared names
    backends: Mapping[str, Backend]
    reason: str  # what the probe of the first says
    passed: Mapping[str, str]  # those that do not work here, or must not be used, and why
    barred: Sequence[str] = ()  # those of them that a trusted network would allow, cheaper ones first

    def __str__(self) -> str:
        first, *others = self.backends
        passed = "".join(f"; {name} not, {why}" for name, why in self.passed.items())
        rest = f"; for links that it cannot make: {', '.join(others)}" if others else ""
        return f"{first} ({self.reason}){passed}{rest}"


def candidates(config: Config, devices: Iterable[str]) -> Mapping[str, Backend]:
    """Return the back ends that an engine with KV on these devices may use, in order, by their declared names.

    Raises:
        ConfigError: The configured back end cannot be loaded, or ``auto`` finds none that works.
    """
    if config.backend != AUTO:
        named = load(config.backend)
        guard(config)(named)
        return {named.name: named}
    kinds = sorted({device.partition(":")[0] for device in devices} - {HOST})
    choice = choose(kinds[0] if kinds else HOST, config)
    _log.info("backend auto: %s", choice)
    if kinds and choice.barred:
        _log.warning(
            "backend auto leaves out %s, so KV crosses hosts without RDMA, through host memory: if you trust every host on the network "
            "of %s, set 'trust_network'",
            ", ".join(choice.barred),
            config.listen,
        )
    return choice.backends


def options_for(backend: Backend, config: Config) -> Mapping[str, Any]:
    """Return the options for a back end: its own, and those of the engine's settings that it inherits.

    Raises:
        ConfigError: With ``auto``, ``backend_options`` holds something other than options by back end.
    """
    options = _own(backend, config)
    if backend.inherits & options.keys():  # an address set for the back end is not mixed with the engine's
        return options
    ours = {"listen": config.listen, "advertise": config.advertise or config.listen}
    return {**options, **{key: ours[key] for key in backend.inherits}}


def choose(
    memory: str, config: Config | None = None, probe_of: Callable[[Backend], Probe | None] | None = None
) -> Choice:
    """Return the first candidate that works here, and those for links that it cannot make.

    Any thread; may take a second, because candidates are probed in this process until one works.

    Raises:
        ConfigError: None works; the message has the reason for each.
    """
    config = config or Config(backend=AUTO)
    objects, barred = guard(config), list[str]()
    order, passed = _declared(memory, config)

    def probe(backend: Backend) -> Probe:
        return (probe_of and probe_of(backend)) or probed(backend)

    def objection(backend: Backend) -> str | None:
        why = objects(backend)
        if why is not None:
            barred.append(backend.name)
        return why

    for i, backend in enumerate(order):
        if why := objection(backend):
            passed[backend.name] = why
            continue
        found = probe(backend)
        if found.usable and (memory in found.memory or backend.last_resort):
            rest = _beside(backend, order[i + 1 :], objection, probe, passed)
            return Choice({b.name: b for b in (backend, *rest)}, found.reason, passed, barred)
        passed[backend.name] = found.reason if not found.usable else f"it does not move {memory} memory"
    raise ConfigError(f"backend 'auto' found none that works here for {memory} memory: {passed}")


def _declared(memory: str, config: Config) -> tuple[list[Backend], dict[str, str]]:
    """Return the candidates for a kind of memory, in the order of their costs, and why others cannot be loaded."""
    found: dict[str, Backend] = {}
    passed: dict[str, str] = {}
    for name in (*available(), *(key for key in config.backend_options if ":" in key)):
        try:
            backend = load(name)
        except ConfigError as e:
            passed[name] = str(e)
            continue
        if found.setdefault(backend.name, backend) is not backend:
            passed[name] = f"another back end is called {backend.name!r} too"

    def cost(backend: Backend) -> tuple[bool, int, str]:
        return memory not in backend.costs, backend.costs.get(memory, 0), backend.name

    return sorted((b for b in found.values() if memory in b.costs or b.last_resort), key=cost), passed


def _beside(
    first: Backend,
    rest: Sequence[Backend],
    objection: Callable[[Backend], str | None],
    probe: Callable[[Backend], Probe],
    passed: dict[str, str],
) -> list[Backend]:
    """Return those of ``rest`` that may be used, and share no exclusive library with those before them.

    One that would keep out a later one is probed first: if it does not work, the later one is used.
    """
    taken, kept = set(first.exclusive), []
    for i, backend in enumerate(rest):
        if taken & backend.exclusive:
            continue
        why = objection(backend)
        if why is None and any(backend.exclusive & later.exclusive for later in rest[i + 1 :]):
            found = probe(backend)
            why = None if found.usable else found.reason
        if why is not None:
            passed[backend.name] = why
            continue
        kept.append(backend)
        taken |= backend.exclusive
    return kept


def _own(backend: Backend, config: Config) -> Mapping[str, Any]:
    """Return a back end's options from the configuration: all of them, or with ``auto`` those under its name."""
    if config.backend != AUTO:
        return config.backend_options
    mine: Mapping[str, Any] = {}
    for key, value in config.backend_options.items():
        if not isinstance(value, Mapping) or not (called(backend, key) or known(key)):
            raise ConfigError(
                "with backend 'auto', backend_options holds the options of each back end under its name "
                f"({', '.join(available())}), as in {{'tcp': {{...}}}}; it cannot hold {key!r}: {value!r}"
            )
        if called(backend, key):
            mine = value
    return mine
