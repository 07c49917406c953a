"""The UCX back end keeps the contract over shared memory, over TCP and in GPU memory, and what is its own besides."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance.transfers import Transfers
from kvxfer.transport import Batch, Completion, Verb
from tests.backends.altered import altered_as
from tests.conftest import require

require("ucx")

from kvxfer_ucx import UcxTransport  # noqa: E402  (only where it can be used)
from kvxfer_ucx.link import Offer  # noqa: E402
from kvxfer_ucx.options import Options  # noqa: E402

TCP = {"ucx": {"TLS": "tcp"}}
NOTICE_S = 30.0
"""A peer that dies before it has dialled is found out by ``connect_timeout_s`` alone: 10 s, on a machine that runs."""


class TestSharedMemory(ConformanceSuite):
    backend = UcxTransport
    notice_s = NOTICE_S


class TestTcp(ConformanceSuite):
    backend = UcxTransport
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


class TestOneMessagePerPiece(Transfers):
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


def test_pieces_that_touch_on_one_side_only(pair: tuple[Side, Side]) -> None:
    a, b = pair
    lengths = [1000, 5000, 2, 70_000]
    a.submit(Verb.SEND, 0, [0, 1000, 6000, 6002], lengths)
    b.submit(Verb.RECV, 0, [500_000, 100, 7, 200_000], lengths)
    assert all(c.error is None for c in run(a, b, ends=2))
    assert (b.bytes[500_000:501_000] == a.bytes[:1000]).all()
    assert (b.bytes[100:5100] == a.bytes[1000:6000]).all()
    assert (b.bytes[7:9] == a.bytes[6000:6002]).all()
    assert (b.bytes[200_000:270_000] == a.bytes[6002:76_002]).all()


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


def test_a_stream_in_flight_is_not_taken_twice(pair: tuple[Side, Side]) -> None:
    a, b = pair
    a.submit(Verb.SEND, 5, [0], [10])
    with pytest.raises(TransportError, match="in flight"):
        a.submit(Verb.SEND, 5, [0], [10])
    a.submit(Verb.RECV, 5, [100], [10])
    b.submit(Verb.SEND, 5, [0], [10])
    b.submit(Verb.RECV, 5, [100], [10])
    assert all(c.error is None for c in run(a, b, ends=4))


def test_a_port_where_nobody_listens() -> None:
    a, gone = Side("first"), Side("gone")
    endpoints = []
    while not endpoints:  # until it is the first that dials
        mine, theirs = a.transport.endpoint(), gone.transport.endpoint()
        if Offer.decode(mine).token < Offer.decode(theirs).token:
            endpoints = [mine, theirs]
    gone.transport.close()
    a.peer = a.transport.connect(*endpoints)
    a.submit(Verb.SEND, 0, [0], [1000])
    (end,) = run(a, ends=1)
    assert "'gone' at 127.0.0.1" in str(end.error) and end.quiet
    a.transport.close()


def test_strangers_at_the_port(pair: tuple[Side, Side]) -> None:
    """Whoever connects and talks nonsense, or nothing, harms nobody."""
    a, b = pair
    port = Offer.decode(a.transport.endpoint()).port
    noise = np.random.default_rng(1)
    strangers = []
    for size in (0, 1, 16, 100, 70_000):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
        stranger.setblocking(False)
        strangers.append(stranger)
        stranger.send(noise.bytes(size))
        run(a, b, seconds=0.02)
    for stranger in strangers[::2]:
        stranger.close()
    a.submit(Verb.SEND, 0, [0], [100_000])
    b.submit(Verb.RECV, 0, [0], [100_000])
    assert all(c.error is None for c in run(a, b, ends=2))
    for stranger in strangers[1::2]:
        stranger.close()


def test_strangers_who_wait_at_the_port_until_it_closes() -> None:
    """UCX's own thread reads what they say; nothing of what it then looks at may be gone before it has let go of them."""
    a = Side("first")
    port = Offer.decode(a.transport.endpoint()).port
    let_in = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(3)]
    let_in[0].send(b"half a")
    run(a, seconds=0.05)
    at_the_door = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(3)]
    a.transport.close()
    for stranger in [*let_in, *at_the_door]:
        with stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "UCX still listens to a stranger"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_an_endpoint_of_another_format_is_refused(pair: tuple[Side, Side]) -> None:
    a, b = pair
    with pytest.raises(TransportError, match="format 99"):
        a.transport.connect(a.transport.endpoint(), altered_as(Offer, b.transport.endpoint(), format=99))


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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


def test_options_are_checked() -> None:
    for options, words in [
        ({"advertize": "10.0.0.1"}, "did you mean 'advertise'"),
        ({"port": 70_000}, "port"),
        ({"ucx": {"RNDV_TRESH": "1k"}}, "did you mean 'RNDV_THRESH'"),
        ({"ucx": {"RNDV_THRESH": "many"}}, "'many'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            UcxTransport("a", options)


def test_a_transport_that_ucx_lacks_cannot_start() -> None:
    with pytest.raises(TransportError, match="'no_such'"):
        UcxTransport("a", {"ucx": {"TLS": "no_such"}})


def test_a_port_that_is_taken(pair: tuple[Side, Side]) -> None:
    port = Offer.decode(pair[0].transport.endpoint()).port
    with pytest.raises(TransportError, match=str(port)):
        UcxTransport("a", {"port": port})


def test_who_decides_a_setting_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options before the environment, the environment before our defaults."""
    monkeypatch.delenv("UCX_MAX_RNDV_RAILS", raising=False)
    assert Options().settings()["MAX_RNDV_RAILS"] == "2"
    monkeypatch.setenv("UCX_MAX_RNDV_RAILS", "1")
    assert "MAX_RNDV_RAILS" not in Options().settings()
    assert Options(ucx={"MAX_RNDV_RAILS": 4, "MM_ERROR_HANDLING": False}).settings() | {} == {
        "MAX_RNDV_RAILS": "4", "MM_ERROR_HANDLING": "n", "RNDV_THRESH": "8192",
    }  # fmt: skip
