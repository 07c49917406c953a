"""Configurations that are compared, as the command line names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import ConfigError


def parsed(compared: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the settings of ``NAME`` or ``NAME:{"setting": value}``.

    Raises:
        ConfigError: The settings are no JSON object.
    """
    name, colon, given = compared.partition(":")
    try:
        settings = json.loads(given) if colon else {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"after {name!r} and a colon, settings must be a JSON object, not {given!r}")
    return name, settings
