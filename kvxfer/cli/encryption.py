"""Tells whether the KV that back ends move is encrypted with an engine's settings, and what to set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.transport import Transport
from kvxfer.transport.auto import AUTO, options_for


def encryption(config: Config, used: Iterable[type[Transport]], known: Iterable[type[Transport]]) -> dict[str, Any]:
    """Tell for each back end that such an engine uses whether it encrypts KV; ``known`` are those to suggest instead.

    Returns:
        By name of the back end ``encrypted``, and ``advice`` on what to set or to beware of.
    """
    able = sorted({backend.name for backend in known if backend.encrypted_by})
    return {backend.name: _of(backend, config, able) for backend in used}


def _of(backend: type[Transport], config: Config, able: list[str]) -> dict[str, Any]:
    option = backend.encrypted_by
    if not option:
        others = f", or choose {' or '.join(able)}, which can encrypt" if able else ""
        where = "use it only on a host and a network that you trust with the contents of KV"
        return {"encrypted": False, "advice": f"this back end cannot encrypt: {where}{others}"}
    try:
        encrypted = options_for(backend, config).get(option) is True
    except ConfigError as e:
        return {"encrypted": False, "advice": str(e)}
    if not encrypted:
        return {"encrypted": False, "advice": f"to encrypt it, set {_setting(backend, option, config)} on all engines"}
    keyless = (
        "set 'key_file' as well: without it, anybody who sits between the engines can replace their keys with others"
    )
    return {"encrypted": True, "advice": "" if config.key_file else keyless}


def _setting(backend: type[Transport], option: str, config: Config) -> str:
    mine: Mapping[str, Any] = {option: True}
    return f'"backend_options": {json.dumps({backend.name: mine} if config.backend == AUTO else mine)}'
