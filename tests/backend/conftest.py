"""Both sides of a link between processes of one host."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvxfer.backend import Liveness, LivenessLinks, Wakeup
from kvxfer.backend.liveness import LINK_BYTES


class Side:
    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.links = LivenessLinks("test", self.wakeup)
        self.end = os.urandom(LINK_BYTES)
        self.links.offer(self.end)
        self.line: Liveness

    def connect(self, other: Side, control: bytes = b"") -> Liveness:
        self.line = self.links.connect(self.end, other.end, other.links.name, "the peer", control)
        return self.line

    def go_on(self) -> None:
        for _ in range(5):
            self.links.handle(self.wakeup.clear())


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    both = Side(), Side()
    yield both
    for side in both:
        side.links.close()
        side.wakeup.close()
