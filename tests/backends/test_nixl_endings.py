"""How batches of the NIXL back end end: completion, quiet memory, peers that stop, die or close."""

# ruff: noqa: F811  (a fixture has the name of what is imported)

import subprocess
import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.geometry.region import Region
from kvxfer.testing.conformance import TransferMode, World
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.participant import LocalParticipant
from kvxfer.transport import Batch, Verb
from tests.backends.nixl_worlds import MIB, TCP, cma, tcp, world  # noqa: F401  (fixtures)
from tests.conftest import require

require("nixl")

from kvxfer_nixl import NixlTransport  # noqa: E402  (only where it can be used)


def test_a_written_byte_is_there_when_we_say_so(world: World) -> None:
    """The target is another process, and hears of the completion through a pipe."""
    a, b = world.local(), world.process("target")
    world.allocate(a, b)
    link = world.link(a, b)
    for i in range(6):
        a.fill(0, seed=i)
        runs = Runs.of([0, 2 * MIB], [MIB, i], [2 * MIB, 400_000])
        expected = overlay(b.content(0), a.content(0), runs)
        world.succeed(link.start(TransferMode.WRITE, a, b, runs))
        assert_equal(b.content(0), expected, "the target's memory")


def test_what_a_stopped_peer_still_owes_comes_before_close_and_not_after(tcp: World) -> None:
    """An aborted read from a stopped peer is not quiet, for NIXL cannot cancel it: the bytes land when the peer goes on.
    After ``close`` nothing lands."""
    a, b = tcp.local(), tcp.process("stopped")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [10]))
    before = a.content(0)
    b.stop()
    started = link.start(TransferMode.READ, b, a, Runs.of([0], [0], [3 * MIB]))
    tcp.run(0.05)
    a.abort(started.halves[0][1])
    [result] = tcp.finish(started)
    assert result.error is not None and not result.quiet
    assert a.transport.capabilities.quiet == "later"
    with pytest.raises(TransportError, match="used by a batch"):
        a.transport.deregister(0)
    assert_equal(a.content(0), before, "the memory while the peer is stopped")
    a.close()
    b.resume()
    tcp.run(0.3)
    assert_equal(a.content(0), before, "the memory after close")


def test_what_a_stopped_peer_still_owes_does_land_without_close(tcp: World) -> None:
    """The same without ``close``: this is what ``quiet=False`` warns of. When the peer is done, the memory is free."""
    a, b = tcp.local(), tcp.process("stopped")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [10]))
    expected = a.content(0)
    b.stop()
    started = link.start(TransferMode.READ, b, a, Runs.of([0], [0], [3 * MIB]))
    a.abort(started.halves[0][1])
    [result] = tcp.finish(started)
    assert not result.quiet
    b.resume()
    expected[: 3 * MIB] = b.content(0)[: 3 * MIB]
    tcp.wait_for(lambda: bool(np.array_equal(a.content(0), expected)), "the landing of what was aborted")
    tcp.wait_for(lambda: _gone(a), "the end of the batch inside NIXL")


def _gone(participant: LocalParticipant) -> bool:
    participant.transport.poll()
    try:
        participant.transport.deregister(0)
    except TransportError:
        return False
    return True


def test_a_killed_peer_leaves_quiet_memory(tcp: World) -> None:
    """NIXL closes the connection with the error: what was in flight from a dead peer does not land any more."""
    a, b = tcp.local(), tcp.process("killed")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [10]))
    started = [link.start(TransferMode.READ, b, a, Runs.of([0], [0], [3 * MIB])) for _ in range(20)]
    b.kill()
    results = tcp.finish(*started)
    assert results[-1].error is not None and b.name in results[-1].error and "died" in results[-1].error
    assert all(r.quiet for r in results)
    a.fill(0, seed=77)
    before = a.content(0)
    tcp.run(0.3)
    assert_equal(a.content(0), before, "the memory after the end")


def test_a_peer_killed_while_two_threads_read_it(cma: World) -> None:
    """Over CMA they are inside the call at that time. The batch ends with one error, and nothing lands later."""
    a, b = cma.local(), cma.process("killed")
    for participant in (a, b):
        participant.allocate([64 * MIB], 1)
    link = cma.link(a, b)
    assert all(r.error is None for r in cma.finish(link.start(TransferMode.READ, b, a, Runs.of([0], [0], [10]))))
    threading.Timer(0.05, b.kill).start()
    until, result = time.monotonic() + 20, None
    while result is None or result.error is None:
        assert time.monotonic() < until, "reads of a dead peer succeed"
        [result] = cma.finish(link.start(TransferMode.READ, b, a, Runs.of([0], [0], [64 * MIB])))
    assert b.name in result.error and result.quiet
    a.fill(0, seed=77)
    before = a.content(0)
    cma.run(0.3)
    assert_equal(a.content(0), before, "the memory after the end")


def test_a_peer_that_closes_with_reads_in_flight_lives_and_so_do_we(tcp: World) -> None:
    """UCX aborts the process that serves a read over TCP when the reader's worker goes in the middle. ``close`` waits."""
    a, b = tcp.local(), tcp.process("server")
    tcp.allocate(a, b)
    c = tcp.local()
    tcp.allocate(c)
    link, other = tcp.link(a, b), tcp.link(c, b)
    for _ in range(20):
        link.start(TransferMode.READ, b, a, Runs.of([0], [0], [3 * MIB]))
    a.close()
    tcp.move(other, TransferMode.READ, b, c, Runs.of([0], [0], [MIB]))


def test_a_reader_is_the_danger_not_a_writer(tcp: World) -> None:
    """Why nothing but writes is offered there: over TCP a peer that was stopped survives a writer that has gone meanwhile."""
    a, b = tcp.process("writer"), tcp.process("stopped")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, TransferMode.WRITE, a, b, Runs.of([0], [0], [10]))
    b.stop()
    for _ in range(5):
        link.start(TransferMode.WRITE, a, b, Runs.of([0], [0], [3 * MIB]))
    a.kill()
    b.resume()
    tcp.run(0.3)
    assert len(b.content(0))


def test_verbs_can_be_left_out(tcp: World) -> None:
    a, b, link = tcp.pair()
    with closing(NixlTransport("writer", {**TCP, "verbs": ["write"]})) as transport:
        assert transport.capabilities.verbs == {Verb.WRITE}
        mine, theirs = transport.endpoint(), a.endpoint()
        memory = np.zeros(10, np.uint8)
        transport.register([Region(memory.ctypes.data, 10)])
        peer = transport.connect(mine, theirs)
        ten, zero = np.array([10]), np.array([0])
        with pytest.raises(TransportError, match="offers WRITE"):
            transport.submit(Batch(Verb.READ, peer, 0, ten, zero, 0, zero))


GONE = """
import random, time
from kvxfer.testing.conformance import World
from tests.backends.nixl_worlds import Cma

random.seed(1)
for _ in range(40):
    world = World(Cma())
    a, b = world.local(), world.local()
    mine, theirs = a.endpoint(), b.endpoint()
    a.connect(mine, theirs)
    if random.random() < 0.3:
        b.connect(theirs, mine)
    time.sleep(random.choice([0.0, 0.0, 0.0005, 0.002, 0.005]))
    world.close()
print("alive")
"""


def test_a_peer_that_goes_while_it_is_connected_takes_nobody_along() -> None:
    """UCX's keepalive did: its first round, just then, used the connection that could not be made."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", GONE], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("alive\n"), done.stderr[-3000:]  # UCX prints what it finds
