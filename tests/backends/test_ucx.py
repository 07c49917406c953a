"""The UCX back end keeps the contract over shared memory, over TCP and in GPU memory, and what is its own besides."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from kvxfer.backend.endpoint import new_token
from kvxfer.errors import TransportError
from kvxfer.geometry.region import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.clock import SetForward
from kvxfer.testing.conformance.history import Histories
from kvxfer.testing.conformance.transfers import Transfers
from kvxfer.transport import Batch, Completion, Verb
from tests.backends.altered import altered_as
from tests.conftest import require
from tests.data.elastic_cache import LAYOUTS
from tests.data.elastic_engine import two_here

require("ucx")

from kvxfer_ucx import UcxTransport  # noqa: E402  (only where it can be used)
from kvxfer_ucx.endpoint import Endpoint  # noqa: E402
from kvxfer_ucx.link import Link  # noqa: E402
from kvxfer_ucx.options import Options  # noqa: E402

TCP = {"ucx": {"TLS": "tcp"}}
NOTICE_S = 30.0
"""A peer that dies before it has dialled is found out by ``connect_timeout_s`` alone: 10 s, on a machine that runs."""


class TestSharedMemory(ConformanceSuite):
    backend = UcxTransport
    notice_s = NOTICE_S


@pytest.mark.slow
class TestTcp(ConformanceSuite):
    backend = UcxTransport
    gigabytes = False
    notice_s = NOTICE_S
    options: ClassVar[dict[str, Any]] = TCP


@pytest.mark.gpu
class TestCuda(ConformanceSuite):
    backend = UcxTransport
    memory = "cuda"


class OneMessagePerPiece(UcxTransport):
    """Moves host memory as if it were a GPU's."""

    def _plain(self) -> bool:
        return False


@pytest.mark.slow
class TestOneMessagePerPiece(Transfers, Histories):
    backend = OneMessagePerPiece


class Side:
    """A transport with one memory."""

    def __init__(self, agent: str, nbytes: int = 1 << 20, **options: Any) -> None:
        self.transport = UcxTransport(agent, options)
        self.bytes = np.random.default_rng(len(agent)).integers(0, 256, nbytes, dtype=np.uint8)
        self.transport.register([Region(self.bytes.ctypes.data, nbytes)])
        self.peer = -1

    def submit(self, verb: Verb, stream: int, offsets: Any, lengths: Any) -> int:
        offsets, lengths = np.array(offsets, np.int64), np.array(lengths, np.int64)
        return self.transport.submit(Batch(verb, self.peer, 0, lengths, offsets, stream=stream))


def link(a: Side, b: Side) -> None:
    mine, theirs = a.transport.endpoint(), b.transport.endpoint()
    a.peer, b.peer = a.transport.connect(mine, theirs), b.transport.connect(theirs, mine)


def run(*sides: Side, ends: int = 0, seconds: float = 20.0) -> list[Completion]:
    """Poll until so many batches have ended, or for the given time if none is expected."""
    found: list[Completion] = []
    until = time.monotonic() + seconds
    while not ends or len(found) < ends:
        if time.monotonic() > until:
            assert not ends, f"{ends - len(found)} of {ends} batches did not end within {seconds:g} s"
            break
        for side in sides:
            found += side.transport.poll()
        time.sleep(0.0005)
    return found


@pytest.fixture(params=[{}, TCP], ids=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    a, b = Side("first", **request.param), Side("second one", **request.param)
    link(a, b)
    yield a, b
    a.transport.close()
    b.transport.close()


@pytest.mark.parametrize("count", [1, 3, 300])
@pytest.mark.parametrize("total", [1, 4096, 8191, 8192, 8193, 65536, 300_000])
def test_lists_around_the_rendezvous_threshold(pair: tuple[Side, Side], total: int, count: int) -> None:
    """Messages of 8192 bytes change the protocol, and a list of pieces may be cut anywhere by it."""
    a, b = pair
    count = min(count, total)
    lengths = np.diff(np.linspace(0, total, count + 1).astype(np.int64))
    starts = np.cumsum(lengths) - lengths
    # Here with gaps of three bytes, there back to front: neither side is one piece.
    here, there = starts + 3 * np.arange(count), total - starts - lengths + 5 * np.arange(count)[::-1]
    expected = b.bytes.copy()
    for h, t, n in zip(here, there, lengths, strict=True):
        expected[t : t + n] = a.bytes[h : h + n]
    a.submit(Verb.SEND, 0, here, lengths)
    b.submit(Verb.RECV, 0, there, lengths)
    assert all(c.error is None for c in run(a, b, ends=2))
    assert (b.bytes == expected).all()


def test_an_aborted_send_fails_though_the_peer_may_have_it_all(pair: tuple[Side, Side]) -> None:
    """UCX carries messages over before anybody receives them; the peer's half of one may then come before the link's end."""
    a, b = pair
    wanted, nbytes = a.bytes.copy(), 1 << 20
    send = a.submit(Verb.SEND, 0, [0], [nbytes])
    assert not run(a, b, seconds=0.2), "nobody has received it"
    a.transport.abort(send)
    (ended,) = run(a, ends=1)
    assert "second one" in str(ended.error)
    b.submit(Verb.RECV, 0, [0], [nbytes])
    (received,) = run(a, b, ends=1)
    assert "first" in str(received.error) if received.error else (b.bytes == wanted).all()


def test_nothing_is_sent_before_the_peer_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link its answer's receipt would wait behind what was sent, and the peer for the receipt."""
    a, b = Side("first", **TCP), Side("second one", **TCP)
    answers, posts, sent = Link.greet, Link.post, []
    monkeypatch.setattr(Link, "greet", lambda self: self.mine.agent == "first" and answers(self))
    monkeypatch.setattr(Link, "post", lambda self, half: (sent.append(half), posts(self, half))[1])
    link(a, b)
    a.submit(Verb.SEND, 0, [0], [1 << 20])
    assert not run(a, b, seconds=0.5) and not sent
    monkeypatch.setattr(Link, "greet", answers)
    b.submit(Verb.RECV, 0, [0], [1 << 20])
    assert [done.error for done in run(a, b, ends=2)] == [None, None]
    assert (b.bytes == a.bytes).all()
    a.transport.close()
    b.transport.close()


@pytest.mark.parametrize("options", [{}, TCP], ids=["shm", "tcp"])
def test_a_link_to_another_end_moves_nothing_though_its_tag_is_right(options: dict[str, Any]) -> None:
    """Whoever hands on an endpoint may have made one of two."""
    a, b = Side("first", **options), Side("second one", **options)
    before = b.bytes.copy()
    mine, theirs = a.transport.endpoint(), b.transport.endpoint()
    a.peer = a.transport.connect(mine, replace(Endpoint.decode(theirs), end=new_token()).encode())
    b.peer = b.transport.connect(theirs, mine)
    a.submit(Verb.SEND, 0, [0], [4096])
    b.submit(Verb.RECV, 0, [0], [4096])
    assert all(done.error is not None for done in run(a, b, ends=2))
    assert (b.bytes == before).all()
    a.transport.close()
    b.transport.close()


@pytest.mark.parametrize("aborts", [True, False], ids=["abort", "disconnect"])
def test_the_end_of_a_link_with_a_full_queue_reaches_the_peer(pair: tuple[Side, Side], aborts: bool) -> None:
    """UCX queues what its buffers to a peer have no room for, and throws that away with the link: the peer had waited for ever."""
    a, b = pair
    b.submit(Verb.RECV, 0, [0], [1])
    a.submit(Verb.SEND, 0, [0], [1])
    run(a, b, ends=2)
    sends = [a.submit(Verb.SEND, stream, [0], [1000]) for stream in range(1, 2000)]
    for stream in range(1, 2001):
        b.submit(Verb.RECV, stream, [0], [1000])
    if aborts:
        a.transport.abort(sends[0])
    else:
        a.transport.disconnect(a.peer)
    ends = run(a, b, ends=len(sends) + 2000)
    assert any("first" in str(c.error) for c in ends)


def test_a_close_with_a_full_queue_reaches_a_peer_that_is_busy(pair: tuple[Side, Side]) -> None:
    """It takes nothing for longer than the other side waits to say farewell: it then learns by the socket, or the connection."""
    a, b = pair
    b.submit(Verb.RECV, 0, [0], [1])
    a.submit(Verb.SEND, 0, [0], [1])
    run(a, b, ends=2)
    for stream in range(1, 2000):
        a.submit(Verb.SEND, stream, [0], [1000])
    for stream in range(1, 2001):
        b.submit(Verb.RECV, stream, [0], [1000])
    a.transport.close()
    ends = run(b, ends=2000)
    assert "first" in str(ends[-1].error)


def test_an_acknowledgement_before_a_close_counts(pair: tuple[Side, Side]) -> None:
    """The receiver closes as soon as it has all: the sender, which looks later, finds that its batch has arrived."""
    a, b = pair
    b.submit(Verb.RECV, 0, [0], [300_000])
    a.submit(Verb.SEND, 0, [0], [300_000])
    found: list[Completion] = []
    until = time.monotonic() + 20
    while not (received := [c for c in b.transport.poll() if isinstance(c, Completion)]):
        assert time.monotonic() < until
        found += [c for c in a.transport.poll() if isinstance(c, Completion)]
    b.transport.close()
    time.sleep(0.2)
    found += run(a, ends=1) if not found else []
    assert [c.error for c in (*received, *found)] == [None, None]


def test_a_process_that_stands_still_as_it_closes_lets_go_of_everything(
    pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    a.submit(Verb.SEND, 0, [0], [1 << 20])
    b.submit(Verb.RECV, 0, [0], [1 << 20])
    assert all(end.error is None for end in run(a, b, ends=2))
    cut, clock = Link.cut, SetForward()

    def stall(self: Link, why: TransportError) -> None:
        cut(self, why)
        clock.forward(60.0)

    monkeypatch.setattr(Link, "cut", stall)
    with clock.installed():
        a.transport.close()
    assert clock.now() - time.monotonic() > 59.0, "it has stood still"
    assert not caplog.records


@pytest.mark.parametrize(("sent", "wanted"), [(100, 99), (99, 100), (100_000, 90_000), (90_000, 100_000)])
def test_halves_of_different_size_both_fail(pair: tuple[Side, Side], sent: int, wanted: int) -> None:
    """UCX tells the receiver of too long a message, and nobody else of anything. The link stays usable."""
    a, b = pair
    a.submit(Verb.SEND, 0, [0], [sent])
    b.submit(Verb.RECV, 0, [0], [wanted])
    ends = run(a, b, ends=2)
    assert all("another size" in str(c.error) and c.quiet for c in ends), ends
    a.submit(Verb.SEND, 1, [0], [1000])
    b.submit(Verb.RECV, 1, [9], [1000])
    assert all(c.error is None for c in run(a, b, ends=2))


def test_links_of_two_transports_come_and_go_unevenly(pair: tuple[Side, Side]) -> None:
    """UCX matches the connections of two workers by their count: what one side has dropped must not stand for what comes later."""
    a, b = pair
    for withdrawn in range(1, 4):
        for _ in range(withdrawn):
            b.transport.withdraw(b.transport.endpoint())
            a.transport.disconnect(a.transport.connect(a.transport.endpoint(), b.transport.endpoint()))
        link(a, b)
        a.submit(Verb.SEND, 0, [0], [200_000])
        b.submit(Verb.RECV, 0, [0], [200_000])
        assert all(c.error is None for c in run(a, b, ends=2))
        a.transport.disconnect(a.peer)
        b.transport.disconnect(b.peer)


def test_what_is_no_address_of_a_worker() -> None:
    """UCX takes addresses on trust, and ends the process for some of those that it could not have made."""
    script = """
import random, sys
from msgspec.structs import replace
from kvxfer.errors import KvxferError
from kvxfer_ucx import UcxTransport
from kvxfer_ucx.endpoint import Endpoint
a, b = (UcxTransport(name, {"ucx": {"TLS": "tcp"}}) for name in "ab")
chance = random.Random(5)
for i in range(200):
    good = Endpoint.decode(b.endpoint())
    address = bytearray(good.address)
    for at in ([0] if i < 40 else chance.choices(range(len(address)), k=3)):
        address[at] = chance.randrange(256)
    # Where no process of this host listens, so that the address is looked at at once.
    bad = replace(good, address=bytes(address[: chance.choice([len(address), 30])]), line=f"kvxfer-ucx-{'0' * 32}")
    peer = a.connect(a.endpoint(), bad.encode())
    for _ in range(3):
        a.poll()
    a.disconnect(peer)
    b.withdraw(Endpoint.encode(good))
"""
    child = run_script(script)
    assert child.returncode == 0, child.stderr[-2000:]


A_SENDER_THAT_GOES = """
import faulthandler, sys, time
from kvxfer.testing.conformance import Suite, TransferMode, World
from kvxfer.geometry import Runs
from kvxfer_ucx import UcxTransport
faulthandler.dump_traceback_later(200, exit=True)
class Ours(Suite):
    backend, options, __test__ = UcxTransport, {options}, False
world = World(Ours())
receiver, sender = world.local(), {sender}
world.allocate(receiver, sender)
link = world.link(receiver, sender)
world.move(link, TransferMode.SEND, sender, receiver, Runs.of([0], [5], [1000]))
sender._idle = lambda: time.sleep(0.001)  # the receiver has other things to do meanwhile
sender.submit(link.halves(TransferMode.SEND, sender, receiver, Runs.of([0], [0], [3_000_000]))[0][1])
{comes}
receiver.turn(True)
{goes}
receiver.disconnect(link.peers[receiver.name])
world.run(0.5)
world.close()
"""


@pytest.mark.parametrize("options", [{}, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize(
    ("sender", "comes", "goes"),
    [
        ("world.local()", "sender.turn(True)", "sender.close()"),
        ("world.process('sender')", "time.sleep(0.05)", "sender.kill()"),
    ],
    ids=["closed", "killed"],
)
def test_a_send_that_nobody_received_and_whose_sender_is_gone_holds_nobody_up(
    options: dict[str, Any], sender: str, comes: str, goes: str
) -> None:
    """ucxx receives what is left at the end of a worker, and waits for its bytes: the data thread had hung there for ever."""
    child = run_script(A_SENDER_THAT_GOES.format(options=options, sender=sender, comes=comes, goes=goes))
    assert child.returncode == 0, child.stderr[-2000:]


def test_strangers_who_flood_a_worker_are_swept_out() -> None:
    """Over TCP anybody who reaches the port can send tagged messages; they must not pile up, and the link goes on."""
    stranger = """
import sys, time
from ucxx import libucxx as ux
from ucxx._lib.arr import Array
context = ux.UCXContext({"TLS": "tcp"}, (ux.Feature.TAG, ux.Feature.WAKEUP))
worker = ux.UCXWorker(context)
there = ux.UCXAddress.create_from_buffer(bytes.fromhex(sys.argv[1]))
endpoint = ux.UCXEndpoint.create_from_worker_address(worker, there, True)
data, until, sent = bytearray(8000), time.monotonic() + 60, 0
while time.monotonic() < until and sent * 8000 <= 200 << 20:
    batch = [endpoint.tag_send(Array(data), ux.UCXXTag(7)) for _ in range(100)]
    while not all(r.completed for r in batch) and time.monotonic() < until:
        worker.progress()
    sent += 100
print(sent * 8000)
"""
    a, b = Side("first", ucx={"TLS": "tcp"}), Side("second one", ucx={"TLS": "tcp"})
    link(a, b)
    address = a.transport.links[a.peer].mine.address
    command = [sys.executable, "-c", stranger, address.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
        before = resident()
        stream, most = 0, 0
        while flood.poll() is None:
            a.submit(Verb.SEND, stream, [0], [50_000])
            b.submit(Verb.RECV, stream, [0], [50_000])
            assert all(c.error is None for c in run(a, b, ends=2))
            stream, most = stream + 1, max(most, resident() - before)
        assert flood.stdout is not None
        sent = int(flood.stdout.read().split()[-1])
    assert sent > 200 << 20, "too few came to tell"
    assert most < sent // 20 + (20 << 20), f"{most >> 20} MiB of {sent >> 20} are kept"
    a.transport.close()
    b.transport.close()


def test_an_endpoint_of_another_format_is_refused(pair: tuple[Side, Side]) -> None:
    a, b = pair
    with pytest.raises(TransportError, match="format 99"):
        a.transport.connect(a.transport.endpoint(), altered_as(Endpoint, b.transport.endpoint(), format=99))


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_importing_it_loads_no_ucx_and_making_one_changes_no_environment() -> None:
    script = """
import os, sys
import kvxfer_ucx
assert "ucxx" not in sys.modules
before = dict(os.environ)
kvxfer_ucx.UcxTransport("a", {}).close()
assert "ucxx" in sys.modules
assert dict(os.environ) == before, set(os.environ) ^ set(before)
"""
    assert run_script(script).returncode == 0


def test_who_decides_a_setting_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options before the environment, the environment before our defaults."""
    monkeypatch.delenv("UCX_MAX_RNDV_RAILS", raising=False)
    assert Options().settings()["MAX_RNDV_RAILS"] == "2"
    monkeypatch.setenv("UCX_MAX_RNDV_RAILS", "1")
    assert "MAX_RNDV_RAILS" not in Options().settings()
    told = Options(ports="20000-20099", ucx={"MAX_RNDV_RAILS": 4, "MM_ERROR_HANDLING": False}).settings()
    assert told["MAX_RNDV_RAILS"] == "4" and told["MM_ERROR_HANDLING"] == "n"
    assert told["TCP_PORT_RANGE"] == "20000-20099"


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_pages_of_an_elastic_cache_come_and_go_under_load(layouts: Any) -> None:
    """Its registration may keep the pages: all goes staged, and every byte is right."""
    engines = two_here("ucx", layouts)
    try:
        assert engines.move(300) == {"right": 300}
        assert engines.staged is True
    finally:
        engines.close()
