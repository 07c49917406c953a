"""What threads have cost, as the kernel counts it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

ENGINE = "engine"
"""The name of all threads of a process that are not kvxfer's."""


class Spent(NamedTuple):
    """CPU seconds, and how often they have gone to sleep, by the names of kvxfer's threads and for all others together."""

    cpu: Counter[str]
    sleeps: Counter[str]

    def since(self, before: Spent) -> tuple[dict[str, float], dict[str, int]]:
        """Return what was spent since then."""
        cpu = {name: float(s - before.cpu[name]) for name, s in self.cpu.items()}
        return cpu, {name: n - before.sleeps[name] for name, n in self.sleeps.items()}


def spent(*pids: int | str) -> Spent:
    """Return what the threads of these processes have spent so far; of none, those of this one."""
    found = Spent(Counter(), Counter())
    for pid in pids or ("self",):
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                name = (task / "comm").read_text().strip()
                seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
                _, _, sleeps = (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            name = name.removeprefix("kvxfer-") if name.startswith("kvxfer-") else ENGINE
            found.cpu[name] += seconds  # type: ignore[assignment]
            found.sleeps[name] += int(sleeps.split()[0])
    return found
