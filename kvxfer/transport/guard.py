"""Which back ends an engine takes that asks for a key: those whose connections ask for a secret, too, or that the operator has named."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvxfer.config import Config
from kvxfer.settings import loopback
from kvxfer.transport.registry import load

__all__ = ["guard", "who"]

_log = logging.getLogger("kvxfer.transport")

_ANYBODY = "whoever reaches the ports that it opens {where} needs no key, and can read and write this process's memory, or end it"


def guard(config: Config) -> Callable[[str], str | None]:
    """Why a back end must not be taken, or ``None``: the answer is of an engine that is configured so. Raises ``ConfigError`` for one
    that cannot be loaded. One that the operator has named, as ``backend`` or in ``backend_options``, is taken with a warning."""

    def objection(name: str) -> str | None:
        if config.key_file is None or guarded(name, config.listen):
            return None
        what = _ANYBODY.format(where="" if load(name).guarded == "never" else f"at {config.listen}").replace("  ", " ")
        if name == config.backend or name in config.backend_options:
            _log.warning("back end %s is used although a key is set, since it was asked for by name: %s", name, what)
            return None
        return f"a key is set, and {what} (name it in 'backend' or 'backend_options' to take it all the same)"

    return objection


def guarded(name: str, listen: str) -> bool:
    """Whether what a back end opens obeys nobody but the peers of its links, when it listens there."""
    kind = load(name).guarded
    return kind == "always" or (kind == "loopback" and loopback(listen))


def who(name: str, listen: str) -> str:
    """Who may speak to a back end's ports, in words."""
    if guarded(name, listen):
        return "the peers of its links, which know a secret of each"
    return "anybody who reaches them: put a firewall before them"
