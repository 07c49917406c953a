"""How batches of the NIXL back end end: completion, quiet memory, peers that stop, die or close."""

# ruff: noqa: F811  (a fixture has the name of what is imported)

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvxfer import clock
from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.testing.clock import SetForward
from kvxfer.testing.conformance import TransferMode, World
from kvxfer.testing.conformance.content import assert_equal
from tests.backends.nixl_worlds import MIB, TCP, cma, tcp, world  # noqa: F401  (fixtures)
from tests.conftest import require

require("nixl")

from kvxfer_nixl import rest  # noqa: E402  (only where it can be used)


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


# --- closing, in processes of their own: a hang would hold the interpreter's lock ---------------------------------------


SHARED = {"ucx": {"TLS": "self,posix,sysv"}}
"""Without CMA the peer copies for us, from a queue in its memory: what it does not take stays with us."""

SCRIPT = """
import sys, threading, time
from kvxfer.errors import TransportError
from kvxfer.testing.conformance import TransferMode
from kvxfer.geometry import Runs
from kvxfer_nixl import link
from tests.backends.conftest import world_of

SHARED = {SHARED}
""".replace("{SHARED}", repr(SHARED))

AMID_WRITES = """
world = world_of("nixl", **SHARED)
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
world = world_of("nixl", threads=2)
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


GONE = """
import random, time
from kvxfer.testing.conformance import World
from tests.backends.conftest import world_of

random.seed(1)
for _ in range(40):
    world = world_of("nixl", threads=2)
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


def test_a_thread_that_rests_is_seen_to_on_a_host_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first look two seconds had passed, and the memory of a sound agent stayed out of use for good."""
    over, time_passes = threading.Event(), SetForward()
    asleep = threading.Thread(target=over.wait, daemon=True)
    asleep.start()
    with time_passes.installed():
        monkeypatch.setattr(clock, "wait", lambda seconds: (time.sleep(seconds), time_passes.forward(5.0)))
        assert rest.come_to_rest([str(asleep.native_id)], 2.0)
    over.set()
    asleep.join()
