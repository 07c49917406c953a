"""An elastic cache: its pages are unmapped and replaced under load, and every byte that moves is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.errors import TransportError
from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.identity import TransferId
from kvxfer.memory import with_elastic
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import Verb
from tests.conftest import require
from tests.control.conftest import Ended, Engine, Released, fetch, offered
from tests.data.elastic_pages import PAGE, ElasticPages, second_mapping

BLOCKS, LAYERS, TOKENS, SPARE = 24, ("a", "b"), 4, 8
UNIT = PAGE // TOKENS
"""Bytes of a token: a block of one layer is a page."""


class KeepsPages(FakeTransport):
    """A back end that moves the pages which memory had when it was registered, and says that it takes elastic memory."""

    def register(self, regions: Sequence[Region]) -> int:
        kept = [replace(r, address=second_mapping(r.address, r.nbytes)) if r.elastic else r for r in regions]
        return super().register(kept)


class Rooms:
    """Two engines whose caches are elastic, or one of them."""

    def __init__(self, backend: str, options: dict[str, Any], elastic: tuple[bool, bool]) -> None:
        self.pages = [ElasticPages(BLOCKS * len(LAYERS), SPARE) for _ in elastic]
        self.engines = []
        for pages, is_elastic in zip(self.pages, elastic, strict=True):
            settings = Config.from_mapping(
                {
                    "backend": backend,
                    "backend_options": options,
                    "transfer_timeout": 20.0,
                    "peer_timeout": 10.0,
                    "staging_bytes": 1 << 20,
                    "elastic": is_elastic,
                }
            )
            offsets = tuple(i * BLOCKS * PAGE for i in range(len(LAYERS)))
            view = View("kv", 0, LAYERS, offsets, BLOCKS, PAGE, PAGE, "test")
            cache = Cache((Region(pages.address, pages.bytes.nbytes),), (Group(TOKENS),), (view,))
            agent = Agent(cache, settings, "elastic")
            directory = Directory(settings, "elastic")
            directory.publish((agent.member,))
            self.engines.append(Engine([agent], directory, [pages.bytes]))

    def hold(self, side: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            for layer in range(len(LAYERS)):
                self.pages[side].map(layer * BLOCKS + block)

    def free(self, side: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            for layer in range(len(LAYERS)):
                self.pages[side].unmap(layer * BLOCKS + block)

    def rows(self, side: int, blocks: Sequence[int]) -> np.ndarray:
        return self.pages[side].bytes.reshape(len(LAYERS), BLOCKS, PAGE)[:, list(blocks)]

    def move(self, number: int, dice: random.Random) -> bool:
        """Move fresh blocks whose pages have just been mapped, and unmap them. Return whether all came right."""
        count = dice.randint(1, 4)
        theirs, mine = dice.sample(range(BLOCKS), count), dice.sample(range(BLOCKS), count)
        transfer = TransferId("own/1/elastic", number)
        producer, consumer = self.engines
        self.hold(0, theirs)
        self.hold(1, mine)
        fresh = np.frombuffer(dice.randbytes(len(LAYERS) * count * PAGE), np.uint8).reshape(len(LAYERS), count, PAGE)
        self.pages[0].bytes.reshape(len(LAYERS), BLOCKS, PAGE)[:, theirs] = fresh
        producer.agents[0].offer(offered(theirs, count * TOKENS, transfer=transfer))
        consumer.agents[0].fetch(fetch(producer.source, mine, count * TOKENS, transfer=transfer, handle=str(number)))
        outcome = consumer.wait(Ended, count=number + 1, timeout=30)[number].outcome
        assert outcome.delivered, outcome
        right = np.array_equal(self.rows(1, mine), fresh)
        for engine in self.engines:
            engine.wait(Released, count=number + 1, timeout=30)
        self.free(0, theirs)
        self.free(1, mine)
        return right

    @property
    def staged(self) -> bool:
        """Whether all went staged; all or nothing is asserted."""
        stats = self.engines[0].agents[0].stats()
        assert not stats.direct or not stats.staged, stats
        return bool(stats.staged)

    def close(self) -> None:
        for engine, pages in zip(self.engines, self.pages, strict=True):
            engine.close()
            pages.close()


@pytest.fixture
def rooms() -> Iterator[Callable[..., Rooms]]:
    made: list[Rooms] = []

    def make(backend: str, elastic: tuple[bool, bool] = (True, True), options: Any = None) -> Rooms:
        made.append(Rooms(backend, options or {}, elastic))
        return made[-1]

    yield make
    for room in made:
        room.close()


BACKENDS = [("zmq", False), ("tcp", False), ("cma", False), ("nixl", True)]


@pytest.mark.parametrize(("backend", "staged"), BACKENDS)
def test_pages_come_and_go_under_load(rooms: Callable[..., Rooms], backend: str, staged: bool) -> None:
    """Straight where a back end follows the pages, and through staging memory where its registration may keep them."""
    if backend in ("nixl", "cma"):
        require(backend)
    room, dice = rooms(backend), random.Random(backend)
    for i in range(300):
        assert room.move(i, dice), f"transfer {i} brought other bytes"
    assert room.staged is staged


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
@pytest.mark.parametrize("elastic", [(True, False), (False, True)], ids=["producer", "consumer"])
def test_either_side_has_it_staged(rooms: Callable[..., Rooms], verbs: list[str], elastic: tuple[bool, bool]) -> None:
    """A back end that keeps pages moves nothing straight if one of the two caches is elastic."""
    room = rooms("kvxfer.testing.fake:FakeTransport", elastic, {"verbs": verbs, "elastic": False})
    dice = random.Random(1)
    for i in range(20):
        assert room.move(i, dice)
    assert room.staged


def test_a_kept_registration_is_caught(rooms: Callable[..., Rooms]) -> None:
    """What these tests are for: a back end that goes on with old pages delivers what was there before."""
    room, dice = rooms(f"{__name__}:KeepsPages"), random.Random(2)
    assert not all(room.move(i, dice) for i in range(20))


def test_back_ends_that_keep_pages_refuse_elastic_memory() -> None:
    pages = ElasticPages(1, 0)
    back_end = FakeTransport("a", {"elastic": False, "verbs": [Verb.READ]})
    with pytest.raises(TransportError, match="elastic memory goes staged"):
        back_end.register([Region(pages.address, PAGE, elastic=True)])
    back_end.close()
    pages.close()


def test_what_an_operator_says_counts() -> None:
    plain, elastic = Region(4096, 4096), Region(1 << 20, 4096, elastic=True)
    assert [r.elastic for r in with_elastic([plain, elastic])] == [False, True]
    assert [r.elastic for r in with_elastic([plain, elastic], True)] == [True, True]
    assert [r.elastic for r in with_elastic([plain, elastic], False)] == [False, False]
