"""Closing the NIXL back end ends in bounded time, also where UCX would never let its progress thread end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import require

require("nixl")

SHARED = {"ucx": {"TLS": "self,posix,sysv"}}
"""Without CMA the peer copies for us, from a queue in its memory: what it does not take stays with us."""

SCRIPT = """
import sys, threading, time
from kvxfer.errors import TransportError
from kvxfer.testing.conformance import TransferMode, World
from kvxfer.geometry import Runs
from kvxfer_nixl import link
from tests.backends.nixl_worlds import Cma

class Shared(Cma):
    options = {SHARED}
""".replace("{SHARED}", repr(SHARED))

AMID_WRITES = """
world = World(Shared())
a, b, c, d = world.local(), world.process("peer"), world.local(), world.local()
world.allocate(a, b, c, d)
to_b, to_c = world.link(a, b), world.link(a, c)
world.move(to_b, TransferMode.WRITE, a, b, Runs.of([0], [0], [100]))
b.stop()
started = [to_b.start(TransferMode.WRITE, a, b, Runs.of([0], [0], [3_000_000])) for _ in range(10)]
world.run(0.3)
if HOW == "killed":
    b.kill()
    assert all(r.error is not None for r in world.finish(*started))
    a.disconnect(to_b.peers[a.name])
    world.half_link(a, d)  # at which NIXL is to forget the peer that is gone
    world.move(to_c, TransferMode.WRITE, a, c, Runs.of([0], [0], [3_000_000]))
if HOW == "left":
    print("fine")
    sys.exit()

try:
    a.close()
    raise AssertionError("it has closed")
except TransportError as e:
    assert "progress thread" in str(e) and "restart this process" in str(e), e
c.close()
e = world.local()
world.allocate(e)
world.move(world.link(d, e), TransferMode.WRITE, d, e, Runs.of([0], [0], [3_000_000]))
d.close(), e.close()
print("fine")
"""

TOLD_NOTHING = """
world = World(Cma())
a, b, c = world.local(), world.process("peer"), world.local()
world.allocate(a, b, c)
if HOW == "unanswered":
    link.GREET_AGAIN_S = 0.001
    half = world.half_link(a, b)
    b.stop()
    started = half.start(TransferMode.WRITE, a, b, Runs.of([0], [0], [10]))
    world.run(6.0)
    assert not started.over()
else:
    world.move(world.link(a, b), TransferMode.WRITE, a, b, Runs.of([0], [0], [10]))
    b.kill() if HOW == "killed" else b.stop()
    for _ in range(300):
        made = world.link(a, c)
        world.turn()
        for one in (a, c):
            one.disconnect(made.peers[one.name])
    world.move(world.link(a, c), TransferMode.WRITE, a, c, Runs.of([0], [0], [3_000_000]))
world.run(0.5)  # its thread wakes by itself, and would not sleep again
a.close(), c.close()
print("fine")
"""


RESET = """
import numpy as np
from kvxfer.data.commands import Connect, Connected, EndpointMade, MakeEndpoint, Reset
from kvxfer.data.data_thread import DataThread
from kvxfer.data.policy import stager
from kvxfer.data.part_ends import Limits
from kvxfer.geometry import Cache, Planner, route
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Abort, Move, Moved, PartRef
from kvxfer.transport import Verb
from kvxfer_nixl import NixlTransport

memory = np.ones((1, 1024, 4, 4096), np.uint8)
cache = Cache.of_tensors(memory, "layer block token unit")
plan = Planner(cache, cache, route([cache], [cache])[cache.rank].assignments[cache.rank]).plan([range(1024)], [range(1024)], 0, 4096)
results = []

def wait(sort, n):
    until = time.monotonic() + 30
    while len(found := [r for r in results if isinstance(r, sort)]) < n:
        assert time.monotonic() < until, (sort, results)
        time.sleep(0.01)
    return found[n - 1]

def connect(peer, number):
    peer.allocate([memory.nbytes], 1)
    data.post(MakeEndpoint(b"%d" % number, number, "nixl", "producer"))
    mine, theirs = wait(EndpointMade, number), peer.endpoint()
    assert mine.failure is None, mine
    data.post(Connect(mine.link, number, mine.endpoint, theirs))
    peer.connect(theirs, mine.endpoint)
    assert wait(Connected, number).failure is None

def move(number, link):
    ref = PartRef("producer", b"%d" % link, TransferId("own/1/x", 0), number, 1)
    data.post(Move(ref, Verb.WRITE, plan, number, 0))
    return ref

world = World(Shared())
data = DataThread(
    "nixl",
    lambda: NixlTransport("us", Shared.options),
    cache.regions,
    stager(cache, 1 << 20),
    results.append,
    Limits(grace=0.2, quarantine=1 << 40),
)
data.start(10)
b, c = world.process("stopped"), world.process("other")
connect(b, 1)
move(1, 1)
assert wait(Moved, 1).failure is None
b.stop()
stuck = move(2, 1)
time.sleep(0.3)
data.post(Abort(stuck))
assert not wait(Moved, 2).quiet
wait(Reset, 1)
connect(c, 2)
move(3, 2)
assert wait(Moved, 3).failure is None and (c.content(0) == 1).all()
assert data.quarantined_bytes == memory.nbytes
data.close(10)
assert not [t for t in threading.enumerate() if t.name == "kvxfer-data"]
print("fine")
"""


def run(script: str, how: str, folder: Path) -> None:
    """Run it in a process of its own, which must come to its end: a hang in there would hold the interpreter's lock."""
    text = f"HOW = {how!r}\n{SCRIPT}{script}"
    with (folder / "out").open("w+") as out:
        group = subprocess.Popen([sys.executable, "-c", text], stdout=out, stderr=out, start_new_session=True)
        try:
            code = group.wait(240.0)
        finally:
            with suppress(ProcessLookupError):  # peers that have stopped
                os.killpg(group.pid, signal.SIGKILL)
        out.seek(0)
        said = out.read()
    assert code == 0 and "fine\n" in said, said[-3000:]


@pytest.mark.parametrize("how", ["killed", "stopped", "left"])
def test_a_peer_that_was_killed_or_stopped_amid_writes(how: str, tmp_path: Path) -> None:
    """NIXL's destructor waited for its thread for ever, with the interpreter's lock in hand; also when the interpreter ended."""
    run(AMID_WRITES, how, tmp_path)


@pytest.mark.parametrize("how", ["killed", "stopped", "unanswered"])
def test_a_peer_that_takes_nothing_any_more_is_told_nothing(how: str, tmp_path: Path) -> None:
    """Each link made with another peer had sent it a message; 250 of them filled its queue, and closing hung then with CMA, too."""
    run(TOLD_NOTHING, how, tmp_path)


def test_a_data_thread_goes_on_whose_back_end_could_not_be_closed(tmp_path: Path) -> None:
    """It gives up a part that is not quiet, so the back end is made anew. The whole process stood still there."""
    run(RESET, "stopped", tmp_path)
