"""What must hold of the two machines in their hostile world (``tests/protocol/world``), whatever its script says.

The first byte of an input picks the setting, the rest is the script.
"""

from __future__ import annotations

import random

from kvxfer.protocol import parts
from tests.protocol.world import SETTINGS, Script, World

SEEDS = [bytes([i]) + random.Random(name).randbytes(1500) for i, name in enumerate(SETTINGS)]


def begin() -> None:
    parts.MIN_CHECKED = 8  # what is hashed goes in several parts even here


def one(script: bytes) -> None:
    setting = list(SETTINGS.values())[script[0] % len(SETTINGS)] if script else SETTINGS["read"]
    World(setting, Script(script[1:])).run()
