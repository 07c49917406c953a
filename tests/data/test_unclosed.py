"""After a back end that could not be closed: what it might still touch stays lost, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from kvxfer.data.commands import Reset, SlotNews
from kvxfer.errors import TransportError
from kvxfer.geometry import Region
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Moved, PartRef
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import Completion, Quieted, Verb
from tests.data.harness import Alone

LINK = b"link"
SLOT = 4096


class Side(Alone):
    """Its back ends take ``delay_s`` for a batch, and one breaks whenever ``breaks`` says so, and then closes or not."""

    def __init__(self) -> None:
        self.delay_s = 60.0
        self._broken: list[bool] = []  # whether the back end that breaks next can be closed
        side = self

        class Breaking(FakeTransport):
            closes = True

            def poll(self) -> list[Completion | Quieted]:
                if side._broken:
                    self.closes = side._broken.pop()
                    raise RuntimeError("it broke")
                return super().poll()

            def close(self) -> None:
                if not self.closes:
                    raise TransportError("it does not let go")
                super().close()

        def make(options: dict[str, Any]) -> FakeTransport:
            return Breaking("consumer", {**options, "delay_s": side.delay_s})

        super().__init__(make, wakeup=False)
        self._slots = np.zeros(64 * SLOT, np.uint8)
        self.peer.register((Region(self._slots.ctypes.data, self._slots.nbytes),))

    def breaks(self, closes: bool) -> None:
        before = self.count(Reset)
        self._broken.append(closes)
        self.wait(Reset, before + 1)

    def count(self, sort: type) -> int:
        return len([r for r in self.results if isinstance(r, sort)])

    def ends(self, ref: PartRef) -> list[Moved]:
        return [r for r in self.results if isinstance(r, Moved) and r.ref == ref]


@pytest.fixture
def side() -> Iterator[Side]:
    with closing(Side()) as side:
        yield side


def test_memory_of_a_later_reset_is_quiet(side: Side) -> None:
    """It counted as lost, although its own back end was closed."""
    side.connect(LINK, 1)
    lost = side.move(LINK, 1, Verb.READ)
    side.breaks(closes=False)
    nbytes = side.data.quarantined_bytes
    assert nbytes and [end.quiet for end in side.ends(lost)] == [False]
    side.connect(LINK, 2)
    later = side.move(LINK, 2, Verb.READ)
    side.breaks(closes=True)
    assert [end.quiet for end in side.ends(later)] == [True]
    assert [end.quiet for end in side.ends(lost)] == [False] and side.data.quarantined_bytes == nbytes


def test_a_link_that_is_made_anew_has_slots(side: Side) -> None:
    """Those that it had held counted against it, so that nothing staged ever moved over it again."""
    side.connect(LINK, 1)
    ref = side.move(LINK, 1, Verb.READ, SLOT)
    for piece in range(8):
        side.data.post(SlotNews(ref, m.SlotReady(*ref[2:], piece, piece * SLOT, SLOT)))
    side.breaks(closes=False)
    side.delay_s = 0.0
    side.breaks(closes=True)
    side.connect(LINK, 2)
    ref = side.move(LINK, 2, Verb.READ, SLOT)
    for piece in range(8):
        side.data.post(SlotNews(ref, m.SlotReady(*ref[2:], piece, piece * SLOT, SLOT)))
    side.wait(SlotNews, 8)
