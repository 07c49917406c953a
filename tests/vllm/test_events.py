"""KV events of vLLM under loads: a router that reads them finds what was loaded as it finds what was computed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tests.ports import free_ports
from tests.vllm.cases import check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import BLOCK, PlayedEngine, prompt
from tests.vllm.wire import Wire

overlap = both_ways


class Router:
    """A router that sends a prompt to the engine that has most of it, as their events say."""

    def __init__(self, *endpoints: str) -> None:
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.SUB) for _ in endpoints]
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.blocks: list[dict[Any, tuple[Any, tuple[int, ...]]]] = [{} for _ in endpoints]
        self.stored: list[list[tuple[Any, ...]]] = [[] for _ in endpoints]
        for socket, endpoint in zip(self._sockets, endpoints, strict=True):
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)

    def read(self, true: Callable[[], bool] = lambda: True, wait: float = 0.3) -> None:
        """Read events until something is so, and for a moment what more there is."""
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end, "an event does not come"
            self._hear()
        more = time.monotonic() + wait
        while time.monotonic() < more:
            self._hear()

    def _hear(self) -> None:
        for i, socket in enumerate(self._sockets):
            while socket.poll(5):
                for event in self._decoder.decode(socket.recv_multipart()[-1]).events:
                    self._apply(i, event)

    def _apply(self, i: int, event: Any) -> None:
        known = self.blocks[i]
        match event:
            case BlockStored():
                assert event.medium in (None, "GPU", "CPU") and len(event.token_ids) == event.block_size * len(
                    event.block_hashes
                )
                parent = event.parent_block_hash
                for n, name in enumerate(event.block_hashes):
                    part = tuple(event.token_ids[n * BLOCK : (n + 1) * BLOCK])
                    known[name] = (parent, part)
                    self.stored[i].append(part)
                    parent = name
            case BlockRemoved():
                for name in event.block_hashes:
                    known.pop(name, None)
            case AllBlocksCleared():
                known.clear()

    def has(self, i: int, text: list[int]) -> int:
        """How many tokens of a prompt an engine has, from its beginning."""
        found, parent = 0, None
        while True:
            part = tuple(text[found : found + BLOCK])
            name = next((name for name, one in self.blocks[i].items() if one == (parent, part)), None)
            if name is None or len(part) < BLOCK:
                return found
            found, parent = found + BLOCK, name

    def choose(self, text: list[int]) -> int:
        return max(range(len(self.blocks)), key=lambda i: self.has(i, text))

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def engines(make: Make) -> Iterator[tuple[PlayedEngine, list[PlayedEngine], Router]]:
    """A prefill engine, two decode engines that publish events, and a router that reads them."""
    p, decodes = make(role="kv_producer"), []
    port = free_ports(2)
    for i in range(2):
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port + i}")
        decodes.append(make(role="kv_consumer", events=events))
    router = Router(*(f"tcp://127.0.0.1:{port + i}" for i in range(2)))
    for i, d in enumerate(decodes):  # a subscriber that is late misses what was published
        for seed in itertools.count(50):
            d.run(until=d.add(prompt(2 * BLOCK, seed), n=1))
            router.read(wait=0.05)
            if router.stored[i]:
                break
        router.stored[i].clear()
    yield p, decodes, router
    router.close()
    for d in decodes:
        d.scheduler.kv_event_publisher.shutdown()


def test_what_was_loaded_is_stored(engines: tuple[PlayedEngine, list[PlayedEngine], Router]) -> None:
    """Each whole block once, in one chain, whichever engine has computed it."""
    p, decodes, router = engines
    texts = [prompt(100, seed=i) for i in range(4)]
    for i, text in enumerate(texts):
        decode(decodes[i % 2], text, prefill(p, text), p)
    router.read(lambda: all(router.has(i % 2, text) >= 96 for i, text in enumerate(texts)))
    for i, text in enumerate(texts):
        assert router.has(i % 2, text) >= 96 and router.has(1 - i % 2, text) == 0
        assert router.choose([*text, *prompt(30, seed=9)]) == i % 2
    for stored in router.stored:
        assert len(stored) == len(set(stored)), "a block is told of twice"


def test_a_router_by_events_loads_only_what_is_new(engines: tuple[PlayedEngine, list[PlayedEngine], Router]) -> None:
    p, decodes, router = engines
    text = prompt(100)
    decode(decodes[1], text, prefill(p, text), p)
    router.read(lambda: router.has(1, text) >= 96)
    longer = text + prompt(60, seed=5)
    d = decodes[router.choose(longer)]
    assert d is decodes[1]
    name = decode(d, longer, prefill(p, longer), p)
    assert d.computed[name] == 1 + 3
    router.read(lambda: router.has(1, longer) >= 160 - BLOCK)


def test_a_load_that_fails_is_not_told_of(engines: tuple[PlayedEngine, list[PlayedEngine], Router], wire: Wire) -> None:
    p, decodes, router = engines
    text, d = prompt(100), decodes[0]
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    d.steps(2)
    router.read()
    assert router.has(0, text) == 0, "told of before it is here"
    for load in wire.loads(d):
        wire.fail(load, "the link broke")
    wire.paused = False
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 100 + 3
    router.read(lambda: router.has(0, text) >= 96)
    assert len(router.stored[0]) == len(set(router.stored[0]))
    assert d.scheduler.reset_prefix_cache()
    d.steps(2)
    router.read(lambda: router.has(0, text) == 0)
