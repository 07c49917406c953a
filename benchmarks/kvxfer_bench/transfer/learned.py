"""Compare learned costs of ways with the first guesses alone, in turns: ``python -m kvxfer_bench.transfer.learned NAME ...``.

For each back end and shape there are two agents on either side, on the same caches. One pair learns, the other goes by the two
thresholds of the handshake: the bytes of a row below which parts go staged, and the size of a piece.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from kvxfer.block_table import Ints
from kvxfer.identity import Source
from kvxfer.protocol.cost import LinkCost, PartWay, WayCosts
from kvxfer_bench.transfer.engine import BenchEngine, Setup
from kvxfer_bench.transfer.pair import pair
from kvxfer_bench.transfer.shapes import Model, Request

WARM, ROUNDS, REPEATS = 40, 40, 3
ROWS = 256, 512, 1024, 2048, 4096, 16384
SIZES = 4 << 20, 32 << 20

learns = True
_ask, _took = WayCosts.ask, WayCosts.took


def ask(self: WayCosts, rows: int, nbytes: int) -> LinkCost | None:
    """Return what the costs say, on the side that learns."""
    return _ask(self, rows, nbytes) if learns else None


def took(self: WayCosts, way: PartWay, seconds: float) -> None:
    """Record what a part took, on the side that learns."""
    if learns:
        _took(self, way, seconds)


class Arms(BenchEngine):
    """A side with an agent that learns ("off") and one that does not ("sample", which is only its name here)."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        WayCosts.ask, WayCosts.took = ask, took  # type: ignore[method-assign]

    def open_agent(self, integrity: Any) -> Source:
        source = super().open_agent("off")
        self._agents[integrity] = self._agents.pop("off")
        return source

    def arm(self, learned: bool) -> None:
        global learns
        learns = learned

    def took(self, way: Any, number: int, dst: Ints, source: Source) -> float:
        return self._fetch(way, number, dst, source, 0.0)["fetch_s"]

    def staged(self, way: Any) -> tuple[int, int]:
        stats = self._agents[way][0].stats()
        return stats.direct, stats.staged


def compare(backend: str, row: int, nbytes: int) -> None:
    """Compare both by a back end, with rows of this length, and print a line."""
    layers = 32
    model = Model(layers, 1, row // 16, 16)
    tokens = nbytes // row // layers * 16
    request = Request(model, tokens)
    with pair(backend, {}, model, request.blocks, ("cpu", "cpu"), None, engine=Arms) as both:
        p, d = both.producer, both.consumer
        arms = {"sample": False, "off": True}
        sources = {}
        for arm in arms:
            sources[arm] = p("open_agent", arm)
            d("open_agent", arm)
        total = WARM + ROUNDS * REPEATS
        p("offer", range(total), request.src)
        time.sleep(0.05)
        spent: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(total):
            for arm in list(arms) if number % 2 else list(arms)[::-1]:
                p("arm", arms[arm])
                d("arm", arms[arm])
                spent[arm].append(d("took", arm, number, request.dst, sources[arm]))
            if number == WARM - 1:
                before = {arm: (p("staged", arm), d("staged", arm)) for arm in arms}
        both.expect(request.dst, request.src, "session")
        after = {arm: (p("staged", arm), d("staged", arm)) for arm in arms}
        d_or_p = d("cost") or p("cost")

    def parts(arm: str, way: int) -> int:
        return max(int(after[arm][side][way] - before[arm][side][way]) for side in (0, 1))

    gains, medians = [], []
    for i in range(REPEATS):
        at = slice(WARM + i * ROUNDS, WARM + (i + 1) * ROUNDS)
        fixed, learned = spent["sample"][at], spent["off"][at]
        gains.append(100 * (sum(fixed) / sum(learned) - 1))
        medians.append(100 * (statistics.median(fixed) / statistics.median(learned) - 1))
    speeds = [nbytes / statistics.median(spent[arm][WARM:]) / 1e9 for arm in arms]
    ways = [f"{parts(arm, 0)}/{parts(arm, 1)}" for arm in arms]
    print(
        f"| `{backend}` | {nbytes >> 20} | {row} | {speeds[0]:.2f} | {speeds[1]:.2f} | {ways[0]} | {ways[1]} | "
        f"{', '.join(f'{g:+.1f}' for g in medians)} | {', '.join(f'{g:+.1f}' for g in gains)} | {d_or_p}",
        flush=True,
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for nbytes in SIZES:
            for row in ROWS:
                compare(name, row, nbytes)
