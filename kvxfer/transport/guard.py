"""Which back ends an engine may use if it has a key, or if other hosts can reach it.

These are the back ends whose connections also demand a secret, and those that the operator has named. All others are used only if the
operator trusts the network (``trust_network``).
"""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.config import Config
from kvxfer.logs import logger
from kvxfer.settings import loopback
from kvxfer.transport.contract import Transport
from kvxfer.transport.registry import called

_log = logger("kvxfer.transport")

_ANYBODY = "anybody who reaches the ports that it opens {where} needs no key, and can read and write this process's memory, or end it"


def guard(config: Config) -> Callable[[type[Transport]], str | None]:
    """Return a function that says why an engine with these settings must not use a back end, or ``None`` if it may.

    A back end that the operator has named, as ``backend`` or in ``backend_options``, is allowed with a warning. So is every one on a
    trusted network.
    """

    def objection(backend: type[Transport]) -> str | None:
        if guarded(backend, config.listen) or (config.key_file is None and loopback(config.listen)):
            return None
        why = "a key is set" if config.key_file is not None else f"other hosts can reach {config.listen}"
        where = "" if backend.guarded == "never" else f"at {config.listen}"
        what = _ANYBODY.format(where=where).replace("  ", " ")
        named = any(called(backend, name) for name in (config.backend, *config.backend_options))
        if named or config.trust_network:
            because = "it was asked for by name" if named else "'trust_network' is set"
            _log.warning("back end %s may be used although %s, because %s: %s", backend.name, why, because, what)
            return None
        return f"{why}, and {what} (if you trust the network, set 'trust_network')"

    return objection


def guarded(backend: type[Transport], listen: str) -> bool:
    """Return whether a back end that listens there serves nobody but the peers of its links."""
    return backend.guarded == "always" or (backend.guarded == "loopback" and loopback(listen))


def who(backend: type[Transport], listen: str) -> str:
    """Describe who can use a back end's ports."""
    if guarded(backend, listen):
        return "the peers of its links, which know a secret of each"
    return "anybody who reaches them: put a firewall in front of them"
