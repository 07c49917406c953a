"""Settings of kvxfer for an SGLang server, which has no option of its own to carry them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvxfer import Config
from kvxfer.settings import json_object

VARIABLE = "KVXFER_SGLANG"
"""The environment variable with the settings: a JSON object, or the path of a file with one."""


def settings(here: str, patience: float, environ: Mapping[str, str] = os.environ) -> Config:
    """Return the settings; where they do not say otherwise, address and time limits are SGLang's own.

    Args:
        here: The address by which SGLang's prefill and decode servers know this host.
        patience: Seconds for which SGLang waits for a transfer.
        environ: Where the variable is looked up.

    Raises:
        ConfigError: The variable or a setting is wrong.
    """
    stated = _stated(environ.get(VARIABLE, ""))
    own: dict[str, Any] = {"transfer_timeout": patience, "start_timeout": patience}
    if not {"listen", "advertise"} & stated.keys():
        own["listen"] = here
    return Config.from_mapping({**own, **stated})


def _stated(text: str) -> dict[str, Any]:
    return json_object(text, VARIABLE, or_file=True) if text.strip() else {}
