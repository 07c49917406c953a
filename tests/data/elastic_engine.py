"""Two engines over elastic caches, in processes of their own or in this one, between which requests are moved."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer.config import Config
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Ended, Released, Role
from kvxfer.testing.engine import AgentEngine
from kvxfer.testing.remote import Remote
from kvxfer.values import BlockTable, Fetch, Offer
from tests.data.elastic_cache import AT_ONCE, BLOCKS, LAYERS, PLANES, TOKENS, ElasticCache, Layout
from tests.data.elastic_pages import ElasticPages

__all__ = ["ElasticEngine", "Setup", "Two", "two_here"]


@dataclass(frozen=True)
class Setup:
    """What an engine is made of.

    Attributes:
        backend: Its name, or ``auto``.
        elastic: Whether its operator says that the cache is; ``None``: it is found out.
        row: Bytes of a block's K or V of one layer; a back end with a longer ``run_bytes`` stages them.
        options: Of the back end.
        pages: Makes the memory, as ``ElasticPages`` does; must be picklable.
    """

    backend: str
    layout: Layout = "contiguous"
    elastic: bool | None = True
    row: int = 4096
    options: Mapping[str, Any] = field(default_factory=dict)
    pages: Callable[..., Any] = ElasticPages


class ElasticEngine(AgentEngine):
    """One of the two. Its methods are called in turn; both engines know by a request's number what its bytes are."""

    def __init__(self, role: Role, setup: Setup) -> None:
        self._dice, self._row = random.Random(f"{role} {setup.backend} {setup.layout}"), setup.row
        self._cache = ElasticCache(setup.layout, setup.row, self._dice, setup.pages)
        config = Config(
            backend=setup.backend,
            backend_options=dict(setup.options),
            transfer_timeout=20.0,
            peer_timeout=10.0,
            staging_bytes=1 << 20,
            elastic=setup.elastic,
        )
        super().__init__(config, caches=[self._cache.cache])
        self._free = list(range(BLOCKS))
        self._held: dict[int, list[int]] = {}
        self._ends: Counter[str] = Counter()

    def step(self, begin: Mapping[int, int], over: Sequence[int], source: Source | None) -> list[int]:
        """Do one of the steps that an engine makes all the time.

        Args:
            begin: Requests to begin, and how many blocks each has.
            over: Requests that both engines have let go of: their blocks are freed, and pages of theirs unmapped.
            source: Where the producer is; ``None``: this is the producer.

        Returns:
            Requests that it has let go of.
        """
        for number in over:
            blocks = self._held.pop(number)
            self._cache.free(blocks)
            self._free += blocks
        for number, count in begin.items():
            blocks = self._held[number] = self._dice.sample(self._free, count)
            self._free = [b for b in self._free if b not in blocks]
            self._cache.hold(blocks)
            transfer, tokens, table = TransferId("own/1/elastic", number), count * TOKENS, BlockTable.of([blocks])
            if source is None:
                self._cache.write(blocks, self._bytes(number, count))
                self.agents[0].offer(Offer(transfer, b"d", 1, tokens, table, True))
            else:
                self.agents[0].fetch(Fetch(str(number), transfer, b"d", source, table, 0, tokens))
        self._cache.stir()
        released = []
        for event in self.agents[0].events(0.0005):
            match event:
                case Ended(outcome=outcome):
                    assert outcome.delivered, outcome
                case Released(transfer=transfer):
                    released.append(transfer.prompt)
                    if source is not None:
                        self._ends["right" if self._is_right(transfer.prompt) else "wrong"] += 1
        return released

    def ends(self) -> Counter[str]:
        """Return how many requests brought ``right`` bytes, and how many ``wrong`` ones; check that none came where no memory was."""
        assert not any(self._cache.pages.zero()), "somebody has written where no memory was"
        return self._ends

    def staged(self) -> tuple[bool, bool]:
        """Return whether anything went straight, and whether anything went staged."""
        stats = self.agents[0].stats()
        return bool(stats.direct), bool(stats.staged)

    def backends(self) -> set[str]:
        """Return those of its links."""
        return {link.backend for link in self.agents[0].links()}

    def close(self) -> None:
        super().close()
        self._cache.pages.close()

    def _bytes(self, number: int, count: int) -> np.ndarray:
        shape = (count, len(LAYERS), len(PLANES), self._row)
        return np.random.default_rng(number).integers(0, 256, shape, np.uint8)

    def _is_right(self, number: int) -> bool:
        blocks = self._held[number]
        return np.array_equal(self._cache.read(blocks), self._bytes(number, len(blocks)))


class Here:
    """An engine in this process, called as ``Remote`` calls one in another."""

    def __init__(self, name: str, make: Callable[..., ElasticEngine], *args: Any) -> None:
        self._engine, self._answers = make(*args), deque[Any]()
        self.close = self._engine.close

    def wait(self) -> None:
        pass

    def send(self, method: str, *args: Any) -> None:
        found = getattr(self._engine, method)
        self._answers.append(found(*args) if callable(found) else found)

    def get(self) -> Any:
        return self._answers.popleft()

    def __call__(self, *call: Any) -> Any:
        self.send(*call)
        return self.get()


class Two:
    """A producer and a consumer, each of which is ``made`` in a process of its own or here.

    Raises:
        KvxferError: One of them cannot be made.
    """

    def __init__(self, producer: Setup, consumer: Setup, made: type[Remote | Here] = Remote) -> None:
        self._dice = random.Random(f"{producer.backend} {producer.layout} {consumer.layout}")
        self._engines: list[Remote | Here] = []
        try:
            self._engines.append(made("producer", ElasticEngine, "producer", producer))
            self._engines.append(made("consumer", ElasticEngine, "consumer", consumer))
            for engine in self._engines:
                engine.wait()
        except BaseException:
            self.close()
            raise

    def move(self, transfers: int, within: float = 120.0) -> Counter[str]:
        """Move as many requests, several at a time, whose pages are mapped before and unmapped after.

        Returns:
            How many ended how; see ``ElasticEngine.ends``.

        Raises:
            KvxferError: One of them failed.
            TimeoutError: They do not end.
        """
        p, d = self._engines
        source = p("source")
        released: Counter[int] = Counter()
        under_way: set[int] = set()
        over: list[int] = []
        begun, end = 0, time.monotonic() + within
        while begun < transfers or under_way or over:
            if time.monotonic() > end:
                raise TimeoutError(f"{sorted(under_way)} do not end")
            begin = {}
            while begun < transfers and len(under_way) < AT_ONCE:
                begin[begun] = self._dice.randint(1, 6)
                under_way.add(begun)
                begun += 1
            p.send("step", begin, over, None)
            d.send("step", begin, over, source)
            released.update(p.get() + d.get())
            over = [number for number in under_way if released[number] == 2]
            under_way -= set(over)
        ends: Counter[str] = p("ends") + d("ends")
        return ends

    @property
    def backends(self) -> set[str]:
        """The back ends of all links."""
        p, d = self._engines
        return set(p("backends") | d("backends"))

    @property
    def ways(self) -> tuple[bool, bool]:
        """Whether anything went straight, and whether anything went staged."""
        [(direct, staged), theirs] = [engine("staged") for engine in self._engines]
        return direct or theirs[0], staged or theirs[1]

    @property
    def staged(self) -> bool:
        """Whether all went staged. Where both ways are open, some go either: each is tried now and then."""
        direct, staged = self.ways
        assert direct or staged
        return not direct

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def two_here(
    backend: str,
    layouts: tuple[Layout, Layout] = ("contiguous", "contiguous"),
    elastic: tuple[bool | None, bool | None] = (True, True),
    **more: Any,
) -> Two:
    """Make both in this process; ``more`` is as for ``Setup``."""
    setups = [Setup(backend, layout, is_elastic, **more) for layout, is_elastic in zip(layouts, elastic, strict=True)]
    return Two(*setups, made=Here)
