"""The Mooncake back end keeps the contract on the engine from PyPI, and what is its own besides.

Run in a process of its own, in which the engine finds the library that it needs (see the Makefile).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry.region import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import Suite, TransferMode, World
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.participant_link import ParticipantLink, Started
from kvxfer.testing.participant import Runs
from kvxfer.transport import Batch, Verb
from tests.backends.altered import altered_as
from tests.conftest import require
from tests.data.elastic_cache import LAYOUTS
from tests.data.elastic_engine import two_here

require("mooncake")

from kvxfer_mooncake import MooncakeTransport  # noqa: E402  (only where it can be used)
from kvxfer_mooncake.endpoint import Endpoint  # noqa: E402


class TestMooncake(ConformanceSuite):
    backend = MooncakeTransport
    rounds = 60


NBYTES = 1 << 30
"""As much as takes a while to move."""


class Plain(Suite):
    backend = MooncakeTransport
    __test__ = False


@pytest.fixture
def world() -> Iterator[World]:
    world = World(Plain())
    yield world
    world.close()


def memory(nbytes: int) -> tuple[np.ndarray[Any, Any], Region]:
    array = np.zeros(nbytes, np.uint8)
    return array, Region(array.ctypes.data, nbytes)


@pytest.mark.parametrize("options", [{"advertize": "10.0.0.7"}, {"advertise": "0.0.0.0"}, {"protocol": "udp"}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="back end 'mooncake'"):
        MooncakeTransport("agent", options)


def test_mooncake_does_not_take_tcp_where_rdma_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("kvxfer_mooncake.library.CARDS", tmp_path)
    with pytest.raises(TransportError, match="no RDMA device"):
        MooncakeTransport("agent", {"protocol": "rdma"})


def test_peers_of_another_protocol_are_refused(world: World) -> None:
    a, b = world.local(), world.local()
    with pytest.raises(TransportError, match="they must agree"):
        a.connect(a.endpoint(), altered_as(Endpoint, b.endpoint(), protocol="rdma"))


def test_an_endpoint_is_for_one_link(world: World) -> None:
    a, b = world.local(), world.local()
    theirs = b.endpoint()
    a.connect(a.endpoint(), theirs)
    with pytest.raises(TransportError, match="in use"):
        a.connect(a.endpoint(), theirs)


def test_a_memory_within_another_outlives_it(world: World) -> None:
    """Mooncake takes no bytes twice, so both are one registration, which stays for as long as either does."""
    a, b = world.local(), world.local()
    array, whole = memory(8192)
    array[:] = np.arange(8192) % 251
    for region in (whole, Region(whole.address + 4096, 1024)):
        a.transport.register([region])
    a.transport.deregister(0)
    b.allocate([1024], 1)
    link = world.link(a, b)
    number = b.submit(Batch(Verb.READ, link.peers[b.name], 0, np.array([1024]), np.array([0]), 1, np.array([0])))
    world.succeed(Started([(b, number)]))
    assert_equal(b.content(0), array[4096:5120], "what was read")


def test_a_memory_that_overlaps_another_in_part_is_refused(world: World) -> None:
    a = world.local()
    _, whole = memory(8192)
    assert a.transport.register([Region(whole.address, 4096)]) == 0
    _, other = memory(16384)
    apart = Region(other.address + 1024, 8192)
    with pytest.raises(TransportError, match="overlap in part"):
        a.transport.register([Region(whole.address + 2048, 4096), apart])
    assert a.transport.register([other]) == 1, "a refusal has left something registered"


def test_more_requests_than_mooncake_queues(world: World) -> None:
    """It holds 2,048 for a peer, fails what comes beyond, and fails what has waited for a second."""
    a, b, link = world.pair()
    expected, source = b.content(0), a.content(0)
    pieces = [Runs.of(at := np.arange(i * 100, (i + 1) * 100) * 200, at + 7, np.full(100, 150)) for i in range(60)]
    world.succeed(*(link.start(TransferMode.READ, a, b, runs) for runs in pieces))
    for runs in pieces:
        expected = overlay(expected, source, runs)
    assert_equal(b.content(0), expected, "the target's memory")


def test_a_peer_that_does_not_answer_holds_up_nobody(world: World) -> None:
    """Mooncake's first request to a peer waits for its answer, and everybody else's then wait behind it."""
    a, b, c = world.local(), world.mortal(), world.other()
    world.allocate(a, b, c)
    mine, theirs = a.endpoint(), b.endpoint()
    b.stop()
    stopped = ParticipantLink({a.name: a.connect(mine, theirs), b.name: -1})
    waiting = Started(
        [(a, a.submit(Batch(Verb.READ, stopped.peers[a.name], 0, *(np.array([n]) for n in (9, 0)), 0, np.array([0]))))]
    )
    world.run(0.2)
    world.move(world.link(a, c), TransferMode.READ, c, a, Runs.of([0], [0], [1000]))
    a.abort(waiting.halves[0][1])
    [result] = world.finish(waiting)
    assert result.error is not None and result.quiet
    b.resume()


def test_peers_that_are_gone_are_forgotten(world: World) -> None:
    """Each engine that is restarted is another peer."""
    a = world.local()
    a.allocate([1000], 1)
    known = []
    for _ in range(3):
        b = world.mortal()
        b.allocate([1000], 2)
        link = world.link(a, b)
        world.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [1000]))
        known.append(len(a.transport._peers))  # type: ignore[attr-defined]
        b.kill()
        a.disconnect(link.peers[a.name])
        world.run(0.1)
    assert known == [1, 1, 1]


def test_a_failed_batch_tells_that_its_link_is_lost(world: World) -> None:
    a, b = world.local(), world.mortal()
    for participant in (a, b):
        participant.allocate_untouched([NBYTES])
    b.write(0, 0, np.ones(1, np.uint8))
    link = world.link(a, b)
    started = link.start(TransferMode.READ, b, a, Runs.of([0], [0], [NBYTES]))
    world.wait_for(lambda: bool(a.read(0, 0, 1)[0]), "the first byte")
    assert a.transport.lost(link.peers[a.name]) is None
    b.stop()
    world.run(0.1)
    assert not started.over(), "it was to be killed amid the batch"
    b.kill()
    [result] = world.finish(started)
    assert result.error is not None and b.name in result.error
    assert a.transport.lost(link.peers[a.name]) is not None


def test_one_refused_request_does_not_lose_the_link(world: World) -> None:
    a, b, link = world.pair()
    b.allocate([4096], 5)
    link = world.link(a, b)
    b.transport.deregister(1)
    [result] = world.finish(link.start(TransferMode.READ, b, a, Runs.of([0], [0], [100]), memory=1))
    assert result.error is not None and a.transport.lost(link.peers[a.name]) is None
    world.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [1000]))


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_pages_of_an_elastic_cache_come_and_go_under_load(layouts: Any) -> None:
    """Over TCP it copies through the addresses: parts may go straight, and every byte is right."""
    engines = two_here("mooncake", layouts, row=1 << 16)
    try:
        assert engines.move(200) == {"right": 200}
        assert engines.ways[0], "some go staged as well, to learn what that costs"
    finally:
        engines.close()


def test_an_address_of_ipv6_needs_mooncakes_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it Mooncake looks for an address of IPv4, and each load had failed as ``peer_lost``."""
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    with pytest.raises(ConfigError, match=r"MC_USE_IPV6=1.*every engine"):
        MooncakeTransport("a", {"advertise": "[::1]"})


LOAD_OVER_SIX = """
from kvxfer.testing.conformance import Suite, TransferMode, World
from kvxfer.testing.participant import Runs
from kvxfer_mooncake import MooncakeTransport
from kvxfer_mooncake.endpoint import Endpoint

class Six(Suite):
    backend, options, __test__ = MooncakeTransport, {"advertise": "::1"}, False

if __name__ == "__main__":
    world = World(Six())
    a, b = world.local(), world.process("b")
    world.allocate(a, b)
    assert Endpoint.decode(a.endpoint()).hosts == ("::1",)
    world.move(world.link(a, b), TransferMode.READ, b, a, Runs.of([0], [0], [1000]))
    world.close()
"""


def test_with_it_bytes_move_over_ipv6(tmp_path: Path) -> None:
    script = tmp_path / "six.py"
    script.write_text(LOAD_OVER_SIX)
    environment = {
        **os.environ,
        "MC_USE_IPV6": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    }
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
