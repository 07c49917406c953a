"""A data thread alone, and the bare back end of its peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvxfer.config import SLOTS
from kvxfer.data.commands import Connect, Connected, EndpointMade, MakeEndpoint, Result
from kvxfer.data.data_thread import DataThread
from kvxfer.data.part_ends import Limits
from kvxfer.data.policy import stager
from kvxfer.geometry import Cache, Planner, route
from kvxfer.identity import TransferId
from kvxfer.protocol.values import LinkId, Move, PartRef
from kvxfer.testing.engine import until
from kvxfer.testing.fake import FakeTransport, Network
from kvxfer.transport import Verb

GRACE_S = 0.3


class Alone:
    """A consumer's data thread over ``make(options)``, whose peer does nothing by itself."""

    def __init__(self, make: Callable[[dict[str, Any]], FakeTransport], grace: float = GRACE_S, **options: Any) -> None:
        options = {"network": Network(), **options}
        self._memory = np.zeros((1, 256, 4, 1024), np.uint8)
        cache = Cache.of_tensors(self._memory, "layer block token unit")
        self._planner = Planner(cache, cache, route([cache], [cache])[cache.rank].assignments[cache.rank])
        self.results: list[Result] = []
        self.data = DataThread(
            "fake",
            lambda: make(options),
            cache.regions,
            stager(cache, SLOTS * 4096),
            self.results.append,
            Limits(grace=grace, quarantine=1 << 40),
        )
        self.peer = FakeTransport("peer", options)
        self.peer.register(cache.regions)
        self.data.start(5.0)

    def connect(self, link: LinkId, number: int) -> None:
        """Make a link, with this number of its attempt."""
        self.data.post(MakeEndpoint(link, number, "fake", "consumer"))
        (made,) = self.wait(EndpointMade, number=number)
        theirs = self.peer.endpoint()
        self.data.post(Connect(link, number, made.endpoint, theirs))
        self.peer.connect(theirs, made.endpoint)
        (done,) = self.wait(Connected, number=number)
        assert done.failure is None

    def move(self, link: LinkId, prompt: int, verb: Verb, piece_bytes: int = 0) -> PartRef:
        """Begin a part of 64 blocks."""
        ref = PartRef("consumer", link, TransferId("own/1/x", prompt), 1, 1)
        plan = self._planner.plan([range(64)], [range(64)], 0, 256)
        self.data.post(Move(ref, verb, plan, prompt, piece_bytes))
        return ref

    def wait(self, sort: type, count: int = 1, number: int | None = None) -> list[Any]:
        """The first results of a sort (of that attempt)."""

        def found() -> list[Any]:
            return [r for r in self.results if isinstance(r, sort) and number in (None, getattr(r, "number", None))]

        until(lambda: len(found()) >= count)
        return found()

    def close(self) -> None:
        self.data.close(5.0)
        self.peer.close()
