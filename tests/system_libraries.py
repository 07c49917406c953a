"""Libraries of the system that users of a back end have, unpacked beside the environment instead of installed."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".venv" / "system"
"""Where `make` unpacks them, if it finds `apt-get`."""


def environment() -> dict[str, str]:
    """The environment of a process that finds these libraries as if they were installed."""
    return {**os.environ, "LD_LIBRARY_PATH": str(FOLDER)}


def lack() -> str | None:
    """Why they cannot be used, or None if they can."""
    return (
        None
        if (FOLDER / "libibverbs.so.1").exists()
        else f"{FOLDER} has no libibverbs.so.1: `make` puts it there on Debian"
    )
