"""Find back ends: by entry point (group ``kvxfer.backends``) or as ``module:Class``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kvxfer.errors import ConfigError, why_not_loaded
from kvxfer.geometry import HOST
from kvxfer.settings import near
from kvxfer.transport.contract import CONTRACTS, Probe, Transport

GROUP = "kvxfer.backends"

INHERITED = frozenset({"listen", "advertise"})
"""Options of a back end that take the engine's setting of that name unless they are set."""
_GUARDED = ("always", "loopback", "never")


def available() -> dict[str, str]:
    """Return the names of installed back ends, with the ``module:Class`` of each. Imports none of them."""
    from importlib.metadata import entry_points  # here, because it takes a sixth as long as importing kvxfer

    return {ep.name: ep.value for ep in sorted(entry_points(group=GROUP), key=lambda ep: ep.name)}


def load(name: str) -> type[Transport]:
    """Return the class of the back end with this name, or of this ``module:Class``.

    Raises:
        ConfigError: The back end is unknown, cannot be loaded, or is written for another contract.
    """
    target = name if ":" in name else available().get(name)
    if target is None:
        extras = _extras()
        if _extra(name) in extras:
            raise ConfigError(
                f"back end {name!r} is not installed", advice=f"in a checkout: pip install ./backends/{name}"
            )
        hint = near(name, [*available(), *extras]) or f"installed are {', '.join(available()) or 'none'}"
        raise ConfigError(f"unknown back end {name!r}; {hint}")
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as e:  # whatever its module does when it is imported costs no other back end anything
        raise ConfigError(f"back end {name!r} ({target}) cannot be loaded: {why_not_loaded(e)}") from e
    if not (isinstance(cls, type) and issubclass(cls, Transport)):
        raise ConfigError(f"back end {name!r} ({target}) is not a kvxfer.transport.Transport class")
    if not getattr(cls, "name", ""):
        raise ConfigError(
            f"back end {name!r} ({target}) has no name: its class needs `name = ...`, the name by which peers know it"
        )
    contract = getattr(cls, "contract", None)
    if contract is None:
        raise ConfigError(
            f"back end {name!r} ({target}) does not say which transport contract it was written for: its class needs "
            f"`contract = N`, and this kvxfer speaks {_contracts()}"
        )
    if contract not in CONTRACTS:
        raise ConfigError(
            f"back end {name!r} was written for transport contract {contract}, this kvxfer speaks {_contracts()}",
            advice="install a release of it that matches",
        )
    if wrong := _misdeclared(cls):
        raise ConfigError(f"back end {name!r} ({target}) cannot be used: its class has {wrong}")
    return cls


def probed(backend: type[Transport]) -> Probe:
    """Ask a back end whether it works here. One whose probe raises, or returns something else, does not."""
    try:
        found = backend.probe()
    except Exception as e:  # an author's mistake costs no other back end anything
        return Probe(False, f"its probe raised {type(e).__name__}: {e}")
    if not isinstance(found, Probe):
        return Probe(False, f"its probe returned {found!r}, which is no kvxfer.transport.Probe")
    return found


def called(backend: type[Transport], name: str) -> bool:
    """Return whether a name in an engine's settings means this back end: its own, an entry point's, or ``module:Class``."""
    if name == backend.name:
        return True
    if ":" not in name and name not in available():
        return False
    try:
        return load(name) is backend
    except ConfigError:
        return False


def known(name: str) -> bool:
    """Return whether this can be the name of a back end, here or on another host with more installed."""
    if ":" in name or name in available() or _extra(name) in _extras():
        return True
    return any(_declares(other, name) for other in available())


def _declares(installed: str, name: str) -> bool:
    try:
        return load(installed).name == name
    except ConfigError:
        return False


def _misdeclared(cls: type[Transport]) -> str | None:
    """Return what others would stumble over in what a back end declares."""
    costs, inherits = cls.costs, cls.inherits
    if not isinstance(costs, Mapping) or not all(isinstance(x, (int, float)) for x in costs.values()):
        return f"`costs = {costs!r}`, which must be a number for each kind of memory, as {{{HOST!r}: 30}}"
    if not isinstance(inherits, AbstractSet) or not inherits <= INHERITED:
        return (
            f"`inherits = {inherits!r}`, which must be a set of {' and '.join(map(repr, sorted(INHERITED)))}, or of one"
        )
    if cls.guarded not in _GUARDED:
        return f"`guarded = {cls.guarded!r}`, which must be one of {', '.join(map(repr, _GUARDED))}"
    return None


def _contracts() -> str:
    return " and ".join(map(str, sorted(CONTRACTS)))


def _extras() -> list[str]:
    """Return the extras of the core: everything that is published beside it, back ends included."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return metadata("kvxfer").get_all("Provides-Extra") or []
    except PackageNotFoundError:  # kvxfer is not installed, but runs from a folder
        return []


def _extra(name: str) -> str:
    return name.replace("_", "-")
