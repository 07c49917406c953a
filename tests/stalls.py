"""A plugin of pytest that has threads stand still, as on a busy host: `make test-stalls ARGS="--stalls 7"`.

In each test four looks at `kvxfer.clock` take 0.15 s, before or after they have read it; they are drawn by the test's name and the number
that `--stalls` gives. What a thread does next is then late, or goes by an old time. A test that fails so fails now and then without it,
too, or has found a race of the product's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator

import pytest

from kvxfer import clock

STALLS, SECONDS, OF_LOOKS = 4, 0.15, 0.06


class Stalls:
    """Which looks at the clock take long."""

    def __init__(self, seed: str) -> None:
        self._seed, self._left, self._rng = seed, 0, random.Random()

    def now(self) -> float:
        """Take the place of ``kvxfer.clock.now``."""
        if self._left <= 0 or self._rng.random() >= OF_LOOKS:
            return time.monotonic()
        self._left -= 1
        seen = time.monotonic()
        time.sleep(SECONDS)
        return seen if self._rng.random() < 0.5 else time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Have the stalls of a test in the test itself, not in what its fixtures do before and after."""
        self._left, self._rng = STALLS, random.Random(self._seed + item.nodeid)
        yield
        self._left = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--stalls``."""
    parser.addoption("--stalls", default="1", metavar="SEED", help="which looks at the clock take long")


def pytest_configure(config: pytest.Config) -> None:
    """Put the clock in its place before anything runs."""
    stalls = Stalls(str(config.getoption("stalls")))
    clock.now = stalls.now
    config.pluginmanager.register(stalls)
