"""A short load beside a long one that both sides move, over real agents: it waits for the parts that are under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.config import SLOTS
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol import parts
from kvxfer.protocol.values import Ended
from kvxfer.testing.fake import FakeTransport
from kvxfer.testing.network import LinkEnd, PendingBatch
from kvxfer.transport import Batch, Fence, Verb
from tests.control.conftest import SeededEngine, fetch, offered, until

LONG, SHORT, WARM = (TransferId(f"own/1/{name}", 0) for name in ("long", "short", "warm"))
PARTS, BLOCK = 12, 3 * 4 * 4 * 16


class Slow(FakeTransport):
    """A link that takes its time for each batch: until the test lets it go."""

    held: ClassVar[deque[PendingBatch]] = deque()

    def start(self, number: int, link: LinkEnd, batch: Batch, after: Fence | None) -> None:
        with self._net.lock:
            super().start(number, link, batch, after)
            if batch.verb is Verb.SEND:
                link.posts[-1].due = time.monotonic() + 3600.0
                self.held.append(link.posts[-1])

    @classmethod
    def let_go(cls) -> None:
        post = cls.held.popleft()
        ours, theirs = post.side, post.side.other
        assert theirs is not None
        with ours.owner._net.lock:  # type: ignore[attr-defined]
            post.due = 0.0
            for side in (ours, theirs):
                side.owner.wake()


def passes(ended: Callable[[], object]) -> None:
    """Let one batch go after the other until something has ended."""
    while not ended():
        until(lambda: Slow.held or ended())
        if Slow.held:
            Slow.let_go()


@pytest.mark.parametrize(("options", "moved"), [({"gathers": False}, "staged"), ({"run_bytes": 1}, "direct")])
def test_a_short_load_waits_for_the_parts_under_way(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], moved: str
) -> None:
    Slow.held.clear()
    announced: list[TransferId] = []  # the transfer of each part, in the order in which they move
    encode = m.encode

    def record(message: m.Message) -> bytes:
        if isinstance(message, m.PartReady):
            announced.append(message.transfer)
        return encode(message)

    monkeypatch.setattr(m, "encode", record)
    monkeypatch.setattr(parts, "HOST_BYTES", 16 * BLOCK)
    slow = {"backend": f"{__name__}:Slow", "verbs": ["send", "recv"], **options}
    config = {"blocks": 16 * PARTS + 2, "staging_bytes": SLOTS * 4096}
    p, d = engine(dict(slow), seed=1, **config), engine(dict(slow), **config)

    def ended(count: int) -> Callable[[], object]:
        return lambda: len([event for event in d.events() if isinstance(event, Ended)]) >= count

    long, short = [*range(16 * PARTS)], [16 * PARTS]
    for transfer, blocks in ((WARM, [16 * PARTS + 1]), (LONG, long), (SHORT, short)):
        p.agents[0].offer(offered(blocks, 4 * len(blocks), transfer=transfer))
    d.agents[0].fetch(fetch(p.source, [16 * PARTS + 1], 4, transfer=WARM, handle="warm"))
    passes(ended(1))
    d.agents[0].fetch(fetch(p.source, long, 4 * len(long), transfer=LONG, handle="long"))
    until(lambda: Slow.held)
    d.agents[0].fetch(fetch(p.source, short, 4, transfer=SHORT, handle="short"))
    until(lambda: len(p.agents[0]._runtime.producer._serves) == 2)
    passes(ended(3))
    ends = d.wait(Ended, count=3)
    assert [end.handle for end in ends] == ["warm", "short", "long"] and all(end.outcome.delivered for end in ends)
    before = announced[: announced.index(SHORT)].count(LONG)
    assert before <= parts.AHEAD + 1, "parts of the long load that came before the short one"
    assert np.array_equal(*(np.stack([side.block(i) for i in (*long, *short)]) for side in (p, d)))
    stats = p.agents[0].stats()
    assert (stats.direct, stats.staged) == ((0, PARTS + 2) if moved == "staged" else (PARTS + 2, 0))
