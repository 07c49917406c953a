"""What one peer, stranger or caller may cost the others: memory, time, deadlines. All is measured beside honest transfers."""

from __future__ import annotations

import select
import socket
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import FrameType

import pytest

from kvxfer.control import accept, peers
from kvxfer.control.frames import HEAD, FrameBuffer
from kvxfer.errors import PeerError
from kvxfer.failures import FailureKind
from kvxfer.geometry import ShardAssignment
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.messages import Decline
from kvxfer.protocol.shares import Turns
from kvxfer.protocol.values import Action
from kvxfer.testing import network
from kvxfer.testing.clock import SetForward
from kvxfer.testing.fake import FakeTransport
from kvxfer.testing.usage import resident
from kvxfer.values import BlockTable
from tests import stalls
from tests.control.conftest import SeededEngine, fetch, offered, until, works
from tests.control.stranger import Stranger, acquainted, framed, hello
from tests.geometry.test_cache import HOSTILE

MIB = 1 << 20
LONG_S = 10.0
"""Longer than this host ever stands still; an honest transfer that is held up waits until its strangers go or its time is over."""


@pytest.fixture
def pair(engine) -> tuple[SeededEngine, SeededEngine]:
    calm = {"transfer_timeout": 60.0, "peer_timeout": 30.0}
    return engine({"verbs": ["read"]}, seed=1, **calm), engine({"verbs": ["read"]}, **calm)


def timed(p: SeededEngine, d: SeededEngine) -> tuple[float, float]:
    """Seconds that a load takes, by this clock and by its own."""
    began = time.monotonic()
    end = works(p, d)
    return time.monotonic() - began, end.seconds


POUR = """
import select, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
host, port, connections, reads, source = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4] == "reads", sys.argv[5]
first, _, then = sys.stdin.buffer.read().partition(b"<again and again>")
then = then and then * max(1, (1 << 18) // len(then))
socks = {}
print("begins", flush=True)
while True:
    while len(socks) < connections:
        try:
            sock = socket.create_connection((host, port), 1, (source, 0))
        except OSError:
            time.sleep(0.01)
            continue
        sock.setblocking(False)
        socks[sock] = [first, 0]
    ready, can, _ = select.select(list(socks) if reads else [], [s for s, (d, a) in socks.items() if a < len(d)], [], 0.05)
    for sock in set(ready) | set(can):
        state = socks[sock]
        try:
            if sock in ready and not sock.recv(1 << 18):
                raise ConnectionError
            if sock in can:
                state[1] += sock.send(state[0][state[1]:state[1] + (1 << 18)])
                if state[1] == len(state[0]) and then:
                    state[:] = then, 0
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            del socks[sock]
"""


@contextmanager
def strangers(
    address: str, first: bytes, again: bytes = b"", connections: int = 1, reads: bool = True, source: str = "127.0.0.1"
) -> Iterator[None]:
    """A process that speaks over so many connections for as long as this lasts, ``first`` and then ``again`` and again; whatever
    is cut off is made anew."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    words = [sys.executable, "-c", POUR, host, port, str(connections), "reads" if reads else "never reads", source]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(first + b"<again and again>" + again)
    process.stdin.close()
    try:
        assert process.stdout.readline() == b"begins\n"
        yield
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def soon(took: list[float]) -> None:
    """Nobody was held up: the median, which shows no stall of this host, is short, and none waited for what strangers may cost."""
    assert statistics.median(took) < 1.0 and max(took) < LONG_S, took


def head(length: int) -> bytes:
    return length.to_bytes(4, "little")


ZMTP = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48) + b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
WORDS = b"".join(f"stranger {i} ".encode() for i in range(20_000))
POURED = {
    "frames that never end": ((head(200_000) + WORDS[:199_000], b"", 400), "agent"),
    "frames that are too long": ((head(1 << 30), WORDS, 4), "agent"),
    "empty frames": ((b"", bytes(4), 4), "agent"),
    "one message of parts without end, by ZeroMQ's protocol": ((ZMTP, b"\1\xff" + bytes(255), 2), "agent"),
    "hellos cut short": ((framed(WORDS[:100_000]) + head(100_000) + WORDS[:99_000], b"", 400), "agent"),
    "connections": ((b"", b"", 1000), "agent"),
    "questions whose answers are not read": ((b"", framed(m.encode(m.Lookup(m.PROTOCOL))), 50), "directory"),
    "news for any engine": (
        (b"", framed(m.encode(Decline(0, tuple(TransferId(f"own/{i}", i) for i in range(5000)), "x"))), 4),
        "directory",
    ),
    "empty frames at the directory": ((b"", bytes(4), 4), "directory"),
    "pings": ((b"", framed(m.encode(m.Ping(1))), 1), "peer"),
    "requests": (
        (
            b"",
            framed(
                m.encode(
                    m.FetchRequest(TransferId("own/1/flood", 0), 1, b"d", 0, 4, BlockTable((b"\0" * 4000,)), 1, 5.0)
                )
            ),
            1,
        ),
        "peer",
    ),
}
"""What is said first, and then again and again, over so many connections, and to whom; a peer says hello before."""


@pytest.mark.parametrize("what", POURED)
def test_strangers_fill_no_memory_and_hold_nobody_up(pair: tuple[SeededEngine, SeededEngine], what: str) -> None:
    p, d = pair
    works(p, d)
    (first, again, connections), where = POURED[what]
    address = f"tcp://127.0.0.1:{p.source.port}" if where == "directory" else p.agents[0].descriptor.address
    before, peak, took = resident(), 0, []
    with closing(FakeTransport("other", {"verbs": ["read"]})) as other:
        if where == "peer":
            first = framed(m.encode(hello(p, endpoint=other.endpoint())))
        with strangers(address, first, again, connections, reads="not read" not in what):
            for _ in range(30):
                took.append(timed(p, d)[0])
                peak = max(peak, resident() - before)
                time.sleep(0.1)
    soon(took)
    assert peak < 64 * MIB, f"{peak / MIB:.0f} MiB more"
    if where == "directory":
        p.directory.notices()


def test_peers_that_hoard_are_told_off(pair: tuple[SeededEngine, SeededEngine]) -> None:
    """What all peers together may have an agent keep is bounded, too."""
    p, d = pair
    works(p, d)
    before, refusals = resident(), 0
    with ExitStack() as stack:
        for peer in range(8):
            s = stack.enter_context(acquainted(p, epoch=peer))
            table = BlockTable((bytes(3 * MIB),))
            for i in range(12):
                s.say(m.FetchRequest(TransferId(f"own/{peer}/hoard", i), i + 1, b"d", 0, 4, table, 1, 300.0))
            s.say(m.Ping(1))
            while not isinstance(said := s.answer(), m.Pong):
                assert isinstance(said, m.AttemptClosed) and said.kind is FailureKind.OVERLOADED
                refusals += 1
        assert refusals > 8 * 12 // 3 and resident() - before < 400 * MIB
        works(p, d)


def test_no_hello_freezes_an_agent(pair: tuple[SeededEngine, SeededEngine]) -> None:
    """Descriptions of caches come in hellos, from anybody who can connect, and each makes us check and plan."""
    p, d = pair
    works(p, d)
    frames = []
    for cache in HOSTILE.values():
        every = tuple(ShardAssignment(0, 0, ("x",), i, i + 1) for i in range(900))
        frames += [m.encode(hello(p, cache=cache)), m.encode(hello(p, cache=cache, assignments=every))]
    small = [framed(f) for f in frames if len(f) < 800]
    assert len(small) >= 3
    before, peak, all_took, untold = resident(), 0, [], []
    with ExitStack() as stack:
        for frame in [*small[:4], *map(framed, frames[-4:])]:
            stack.enter_context(strangers(p.agents[0].descriptor.address, frame, connections=4))
        for _ in range(30):
            took, seconds = timed(p, d)
            all_took.append(took)
            untold.append(abs(took - seconds))
            peak = max(peak, resident() - before)
            time.sleep(0.05)
    soon(all_took)
    assert statistics.median(untold) < 0.5, untold
    assert peak < 64 * MIB, f"{peak / MIB:.0f} MiB more"


def test_hellos_without_end_keep_no_engine_out(engine) -> None:
    """Hundreds of connections from another host, each with a short hello that takes long to look at, and none is left for long
    without another. Engines that are new come in, and what they ask a directory for is looked at."""
    calm = {"transfer_timeout": 60.0, "peer_timeout": 30.0}
    p = engine({"verbs": ["read"]}, seed=1, **calm)
    frame = min((m.encode(hello(p, cache=cache)) for cache in HOSTILE.values()), key=len)
    assert len(frame) < 400
    with strangers(p.agents[0].descriptor.address, framed(frame), connections=400, source="127.0.0.9"):
        until(lambda: len(p.agents[0].links()) > 0)
        for _ in range(3):
            works(p, engine({"verbs": ["read"]}, **calm))
    until(lambda: len(p.agents[0].links()) == 3, 20)


def test_of_too_many_who_say_nothing_one_goes_of_the_host_that_has_most(
    engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "GUESTS", 4)
    p = engine({"verbs": ["read"]}, seed=1)
    with ExitStack() as stack:
        s = stack.enter_context(Stranger(p.agents[0].descriptor.address))
        many = [stack.enter_context(Stranger(p.agents[0].descriptor.address, source="127.0.0.9")) for _ in range(8)]
        assert all(x.hung_up_on() for x in many[:5])
        s.say(hello(p))
        assert isinstance(s.answer(), m.Refused), "it is heard"


def test_what_strangers_have_said_is_forgotten_with_their_connections(
    pair: tuple[SeededEngine, SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are cut off for want of memory while one of them is looked at: it had stayed until then, and was not counted."""
    p, d = pair
    works(p, d)
    looked, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        looked.set()
        assert go_on.wait(60)
        raise PeerError("it is of no use")

    monkeypatch.setattr(peers, "admit", slow)
    before, said = resident(), bytes(200 << 10)
    with ExitStack() as stack:
        stack.callback(go_on.set)

        def comes() -> Stranger:
            return stack.enter_context(Stranger(p.agents[0].descriptor.address))

        comes().say(hello(p))
        assert looked.wait(60)
        crowd: list[Stranger] = []

        def in_hand() -> bool:
            """Whether all that could not be kept have been cut off; these are forgotten here, too."""
            crowd[:] = [s for s in crowd if not select.select([s.socket], [], [], 0)[0]]
            return len(crowd) <= accept.GUEST_BYTES // len(said)

        for _ in range(500):
            crowd.append(comes())
            with suppress(ConnectionError):
                crowd[-1].send(said)
            until(in_hand)
        works(p, d)
        assert resident() - before < 64 * MIB, f"{(resident() - before) / MIB:.0f} MiB more"


def test_silence_counts_from_the_last_word_however_long_this_side_stood_still(engine) -> None:
    """What came meanwhile was read afterwards, and is not to be pardoned: a peer had been waited for so much longer."""
    p = engine({"verbs": ["read"]}, seed=1, peer_timeout=4.0)
    with acquainted(p) as s:
        fence = Sluggish()
        p.agents[0].offer(offered([1], 4, transfer=TransferId("own/9/slow", 0)), fence)
        assert fence.asked.wait(60)
        s.say(m.Ping(1))
        p.agents[0]._loop._awake -= 60.0  # as if it had stood still for so long
        fence.go_on.set()
        assert isinstance(s.answer(), m.Pong)
        began = time.monotonic()
        assert s.hung_up_on() and time.monotonic() - began < 30.0


def test_each_has_its_turn() -> None:
    turns: Turns[str, str] = Turns()
    for who, what in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        turns.add(who, what)
    assert [turns.next() for _ in range(3)] == ["a1", "b1", "c1"]
    turns.add("c", "c2")
    assert [turns.next() for _ in range(5)] == ["a2", "b2", "c2", "a3", None]
    for who, what in (("a", "a1"), ("b", "b1"), ("b", "b2")):
        turns.add(who, what)
    for who, what in (("a", "a1"), ("b", "b1"), ("b", "b9"), ("c", "c1")):
        turns.remove(who, what)
    assert [turns.next() for _ in range(2)] == ["b2", None]


class Sluggish:
    """A fence that makes whoever asks it wait until it may go on."""

    event = None

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def passed(self) -> bool:
        self.asked.set()
        assert self.go_on.wait(60)
        return True


def test_time_runs_from_the_call(clock: SetForward, engine) -> None:
    """However late the control thread comes to it: the deadline, and what is reported."""
    p, d = engine({"verbs": ["read"]}, seed=1), engine({"verbs": ["read"]}, transfer_timeout=120.0)
    works(p, d)

    def late(name: str, seconds: float) -> tuple[float, float]:
        """Ask for something while the control thread stands still, and for so long after; between which times it was asked."""
        fence = Sluggish()
        d.agents[0].offer(offered([1], 4, transfer=TransferId("own/9/slow", 0)), fence)
        assert fence.asked.wait(60)
        before = clock.now()
        d.agents[0].fetch(fetch(p.source, [5], 4, transfer=TransferId(f"own/1/{name}", 0), handle=name))
        after = clock.now()
        clock.forward(seconds)
        fence.go_on.set()
        return before, after

    p.agents[0].offer(offered([3], 4, transfer=TransferId("own/1/there", 0)))
    for name, kind, seconds in (("there", None, 20.0), ("never", FailureKind.NEVER_OFFERED, 119.5)):
        before, after = late(name, seconds)
        end = d.over(name, 30.0)
        assert end.outcome.kind is kind and before <= end.stages.began <= after, end
        assert end.seconds == pytest.approx(end.stages.ended - end.stages.began)
    assert 119.9 < end.seconds < 200.0, "from when the control thread came to it, its time is over after 239.5 s"


def test_calls_without_end_delay_no_deadline(clock: SetForward, engine) -> None:
    p, d = engine({"verbs": ["read"]}, seed=1), engine({"verbs": ["read"]}, transfer_timeout=120.0)
    works(p, d)
    loop, over = d.agents[0]._loop, threading.Event()

    def again(now: float) -> list[Action]:
        if not over.is_set():
            loop.do(again)
        return []

    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=TransferId("own/1/never", 0), handle="never"))
    loop.do(again)
    clock.forward(121.0)
    try:
        assert d.over("never", 30.0).outcome.kind is FailureKind.NEVER_OFFERED
    finally:
        over.set()


def test_a_peer_that_stands_still_for_a_while_loses_nothing(engine) -> None:
    """Though thousands of messages wait for it meanwhile."""
    p = engine({"verbs": ["read"]}, seed=1, peer_timeout=300.0, lease=300.0, transfer_timeout=300.0)
    transfers = [TransferId("own/1/many", i) for i in range(12_000)]
    with acquainted(p) as s:
        for i, transfer in enumerate(transfers):
            s.say(m.FetchRequest(transfer, i + 1, b"d", 0, 4, BlockTable.of([[3]]), 1, 300.0))
        s.say(m.Ping(1))
        assert isinstance(s.answer(), m.Pong)
        for transfer in transfers:
            p.agents[0].offer(offered([3], 4, transfer=transfer))
        time.sleep(1.0)
        have: set[TransferId] = set()
        while len(have) < len(transfers):
            if isinstance(said := s.answer(), m.PartReady):
                have.add(said.transfer)
            else:
                assert isinstance(said, m.SlotReady), said


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts what the control and data threads do, in calls, that are started within.

    Those of the played network, and of a played clock, count for nothing.
    """
    events = [0]

    def hook(frame: FrameType, event: str, arg: object) -> None:
        ours = threading.current_thread().name.startswith(("kvxfer-control", "kvxfer-data"))
        if ours and frame.f_code.co_filename not in (network.__file__, stalls.__file__):
            events[0] += 1

    threading.setprofile(hook)
    try:
        yield events
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_turn_costs_the_same_however_much_is_under_way(engine) -> None:
    """Alone, and beside 200 links, 10,000 offers and 10,000 fetches that wait: counted in calls."""
    long = {"transfer_timeout": 600.0, "peer_timeout": 600.0, "lease": 600.0}
    with counted() as events:
        p, d = engine({"verbs": ["read"]}, seed=1, **long), engine({"verbs": ["read"]}, blocks=10_016, **long)

    def cost() -> float:
        works(p, d)
        before = events[0]
        for _ in range(40):
            works(p, d)
        return (events[0] - before) / 40

    alone = cost()
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(acquainted(p))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        nobody = Source("127.0.0.1", silent.getsockname()[1], 1)
        for i in range(10_000):
            p.agents[0].offer(offered([2], 4, transfer=TransferId("own/1/waits", i)))
            d.agents[0].fetch(fetch(nobody, [16 + i], 4, transfer=TransferId("own/2/waits", i), handle=f"waits {i}"))
        until(lambda: p.agents[0].stats().offers >= 10_000 and d.agents[0].stats().fetches >= 10_000, 60)
        among = cost()
    assert among < 1.2 * alone, f"{among:.0f} calls a transfer, {alone:.0f} with nothing else under way"


def test_frames_of_no_length_count_as_what_they_take() -> None:
    buffer, many = FrameBuffer(), 10_000
    tracemalloc.start()
    buffer.rest += (HEAD.pack(2) + b"ab") * many
    before = tracemalloc.get_traced_memory()[0]
    assert not buffer.split(100) and len(buffer.frames) == many
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.5 * taken < buffer.nbytes < 2 * taken + (1 << 16)
