"""`kvxfer demo --chaos`: servers that die, fall silent and come back, at random from a seed, while clients use them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer_vllm.demo.load import Say, Stage, staged, under_load
from kvxfer_vllm.demo.servers import await_ready

CLIENTS = 3
PREFILLS = 2


class Havoc:
    """What happens to the servers. Each method returns when the server is as it was, or its successor answers."""

    DEEDS = ("kill prefill", "kill prefill", "pause prefill", "pause prefill", "pause decode", "kill decode")

    def __init__(self, stage: Stage, seed: int, say: Say) -> None:
        self._stage, self._say = stage, say
        self._random = random.Random(seed)
        self.deeds: Counter[str] = Counter()

    def strike(self) -> None:
        name = self._random.choice(self._stage.prefills)
        deed = self._random.choice(self.DEEDS)
        self._say(f"{deed} ({name})" if "prefill" in deed else deed)
        self.deeds[deed] += 1
        if deed == "kill prefill":
            self._kill(name)
        elif deed == "kill decode":
            self._kill("decode")
        elif deed == "pause prefill":
            self._pause(name, self._random.uniform(1, 12))  # also longer than peers wait for a sign of life
        else:
            self._pause("decode", self._random.uniform(0.5, 4))
        time.sleep(self._random.uniform(1, 5))

    def _kill(self, name: str) -> None:
        self._stage[name].kill()
        await_ready([self._stage.start(name)], 300)

    def _pause(self, name: str, seconds: float) -> None:
        self._stage[name].pause()
        time.sleep(seconds)
        self._stage[name].resume()


def chaos(model: Path, logs: Path, settings: Mapping[str, Any], seconds: float, seed: int, say: Say) -> dict[str, Any]:
    """Run it for about `seconds` after the servers have started; returns `under_load`'s report. Raises ServerError if a
    server does not start."""
    with staged(model, logs, settings, PREFILLS, say) as (stage, expected):
        havoc = Havoc(stage, seed, say)

        def strike() -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                havoc.strike()
            say("calm again")

        report = under_load(stage, expected, CLIENTS, seed, strike)
    return {"seed": seed, "havoc": dict(sorted(havoc.deeds.items())), **report}
