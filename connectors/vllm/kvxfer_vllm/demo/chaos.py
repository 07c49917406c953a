"""`kvxfer demo --chaos`: servers that die, fall silent and come back at random while clients use them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.cli.progress import Say
from kvxfer_vllm.demo.load import Stage, staged, under_load
from kvxfer_vllm.demo.servers import await_ready

CLIENTS = 3
PREFILLS = 2


class FaultInjector:
    """Kills and pauses a stage's servers at random, and counts the faults."""

    FAULTS = ("kill prefill", "kill prefill", "pause prefill", "pause prefill", "pause decode", "kill decode")

    def __init__(self, stage: Stage, seed: int, say: Say) -> None:
        self._stage, self._say = stage, say
        self._random = random.Random(seed)
        self.injected: Counter[str] = Counter()

    def inject(self) -> None:
        """Inject one fault. Return a few seconds after the server has resumed or its successor answers."""
        name = self._random.choice(self._stage.prefills)
        fault = self._random.choice(self.FAULTS)
        self._say(f"{fault} ({name})" if "prefill" in fault else fault)
        self.injected[fault] += 1
        if fault == "kill prefill":
            self._kill(name)
        elif fault == "kill decode":
            self._kill("decode")
        elif fault == "pause prefill":
            self._pause(name, self._random.uniform(1, 12))  # sometimes longer than peers wait for a sign of life
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


def server_chaos(
    model: Path, logs: Path, settings: Mapping[str, Any], seconds: float, seed: int, say: Say
) -> dict[str, Any]:
    """Start servers and clients, and inject faults for about ``seconds``.

    Return ``under_load``'s report, with the seed and the number of faults of each kind.

    Raises:
        ServerError: A server does not start.
    """
    with staged(model, logs, settings, PREFILLS, say) as (stage, expected):
        faults = FaultInjector(stage, seed, say)

        def inject_faults() -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                faults.inject()
            say("no more faults")

        report = under_load(stage, expected, CLIENTS, seed, inject_faults)
    return {"seed": seed, "faults": dict(sorted(faults.injected.items())), **report}
