"""The NCCL back end over its fake on CPUs: the contract, and how it stands up to what NCCL cannot do by itself."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry.region import Region
from kvxfer.identity import TransferId
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import ParticipantLink, Started, TransferMode, World
from kvxfer_nccl import NcclTransport, transport
from kvxfer_nccl.binding import Binding
from kvxfer_nccl.endpoint import Endpoint
from kvxfer_nccl.tasks import Task
from tests.backends.fake_nccl import FakeBinding, FakeNcclTransport, FakePipe
from tests.backends.nccl_faults import LARGE, SMALL, Faults
from tests.control import conftest as agents
from tests.control.conftest import Ended, FailureKind, Released, fetch, offered

engine = agents.engine  # the fixture


class TestFake(ConformanceSuite):
    backend = FakeNcclTransport
    gigabytes = False


def test_threads_are_used_again() -> None:
    """Each new one would keep what NCCL allocates on it."""
    used = []
    for _ in range(20):
        task = Task(threading.current_thread, lambda: None)
        assert task.wait(time.monotonic() + 30.0)
        used.append(task.value)
    assert len(set(used)) <= 4


class TestFaults(Faults):
    backend = FakeNcclTransport
    pipe = FakePipe


BACKEND = "tests.backends.fake_nccl:FakeNcclTransport"


class DeviceFence:
    """A fence that a stream can wait for, so that nobody has to ask it."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def passed(self) -> bool:
        raise AssertionError("the host asked a fence that has an event")


def test_the_stream_waits_for_a_fence_with_an_event(world: World) -> None:
    a, b, link = world.pair()
    world.move(link, TransferMode.SEND, a, b, SMALL)
    fence, before = DeviceFence(), b.content(0)
    started = link.start(TransferMode.SEND, a, b, LARGE, fences={a.name: fence})
    world.run(0.1)
    assert not started.begun_to_end() and (b.content(0) == before).all()
    fence.event.set()
    world.succeed(started)


class OneGpu(FakeNcclTransport):
    """All share a GPU."""

    @classmethod
    def load(cls) -> Binding:
        binding = FakeBinding()
        binding._identity = "GPU-1"
        return binding


def test_two_ranks_on_one_gpu_are_refused_with_advice() -> None:
    a, b = OneGpu("a", {}), OneGpu("b", {})
    try:
        with pytest.raises(TransportError, match="GPU-1.*cuda_ipc"):
            a.connect(a.endpoint(), b.endpoint())
    finally:
        a.close()
        b.close()


def test_two_releases_are_refused() -> None:
    a, b = FakeNcclTransport("a", {}), FakeNcclTransport("b", {})
    try:
        mine, theirs = a.endpoint(), Endpoint.decode(b.endpoint())
        other = Endpoint(*[*(getattr(theirs, f) for f in theirs.__struct_fields__[:-1]), "1.2.3"])
        with pytest.raises(TransportError, match=r"1\.2\.3"):
            a.connect(mine, other.encode())
    finally:
        a.close()
        b.close()


def test_strangers_who_say_nothing_keep_no_peer_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "STRANGERS", 4)
    monkeypatch.setattr(transport, "GREET_S", 60.0)  # they are not given up meanwhile for their silence
    a, b = world.local(), world.local()
    world.allocate(a, b)
    mine, theirs = a.endpoint(), b.endpoint()
    with ExitStack() as stack:
        for end in (mine, theirs):  # either may be the one that is dialled
            where = Endpoint.decode(end)
            for _ in range(4):
                stack.enter_context(socket.create_connection((where.host, where.port)))
        world.run(0.1)
        link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})
        halves = link.halves(TransferMode.SEND, a, b, SMALL)
        for result in world.finish(Started([(p, p.submit(batch)) for p, batch in halves]), seconds=15):
            assert result.error is None


GARBLED = {
    "arrays in arrays": b"\x94\x03\x00\x00" + b"\x91" * 3000,
    "no greeting": b"\x93\x03\x00\x00",
    "text that is no UTF-8": b"\x92\x08\xa2\xff\xfe",
    "another's name": b"\x93\x00\xc4\x10" + b"x" * 16 + b"\xc4\x10" + b"y" * 16,
}


@pytest.mark.parametrize("how", GARBLED)
def test_strangers_who_send_what_is_no_message_end_no_link(world: World, how: str) -> None:
    a, b = world.local(), world.local()
    world.allocate(a, b)
    mine, theirs = a.endpoint(), b.endpoint()
    link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})
    with ExitStack() as stack:
        for end in (mine, theirs):
            where = Endpoint.decode(end)
            stranger = stack.enter_context(socket.create_connection((where.host, where.port)))
            stranger.sendall(len(GARBLED[how]).to_bytes(4) + GARBLED[how])
        world.run(0.1)
        halves = link.halves(TransferMode.SEND, a, b, SMALL)
        for result in world.finish(Started([(p, p.submit(batch)) for p, batch in halves]), seconds=15):
            assert result.error is None


def test_memory_of_two_gpus_is_refused() -> None:
    """One NCCL rank drives one GPU."""

    class TwoKinds(FakeBinding):
        memory: ClassVar[frozenset[str]] = frozenset({"cuda"})

    class Cuda(FakeNcclTransport):
        @classmethod
        def load(cls) -> Binding:
            return TwoKinds()

    transport = Cuda("a", {})
    try:
        with pytest.raises(TransportError, match="cuda:0.*cuda:1"):
            transport.register([Region(4096, 4096, "cuda:0"), Region(65536, 4096, "cuda:1")])
    finally:
        transport.close()


def test_without_a_gpu_it_says_what_is_missing() -> None:
    probe = NcclTransport.probe()
    if probe.usable:
        pytest.skip("there is a GPU here")
    assert "nccl" in probe.reason and not probe.memory
    with pytest.raises(TransportError, match="nccl"):
        NcclTransport("agent", {})


FAKE = {"backend": BACKEND}


class Gate:
    """Holds up what the fake's streams send, until it is opened, and counts communicators."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event, self.opened, self.held = threading.Event(), 0, threading.Event()
        move, open_ = FakePipe.move, FakePipe.open

        def held(pipe: FakePipe, runs: list[tuple[int, int]]) -> None:
            if pipe._spec.sends and sum(n for _, n in runs) > 1:  # not the byte by which a pair connects
                pipe.wait(self)  # type: ignore[arg-type]  # it has an event
                self.held.set()
            move(pipe, runs)

        def counted(pipe: FakePipe) -> None:
            self.opened += 1
            open_(pipe)

        monkeypatch.setattr(FakePipe, "move", held)
        monkeypatch.setattr(FakePipe, "open", counted)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.event.set()


def start_eight(p: Any, d: Any) -> None:
    for i in range(8):
        transfer = TransferId("own/1/eight", i)
        p.agents[0].offer(offered([2 * i, 2 * i + 1], 8, transfer=transfer))
        d.agents[0].fetch(fetch(p.source, [31 - 2 * i, 30 - 2 * i], 8, transfer=transfer, handle=str(i)))


@pytest.mark.parametrize("victim", range(0, 8, 3))
def test_one_of_eight_transfers_is_aborted_and_seven_complete(engine: Any, gate: Gate, victim: int) -> None:
    """Its abort costs all that is in flight their communicator; the session makes it anew, and they go on."""
    p, d = engine(dict(FAKE), seed=1, blocks=32), engine(dict(FAKE), blocks=32)
    start_eight(p, d)
    assert gate.held.wait(30)
    d.agents[0].cancel(str(victim), "client left")
    d.wait(Ended)
    gate.event.set()
    ends = {e.handle: e.outcome for e in d.wait(Ended, count=8)}
    assert ends.pop(str(victim)).kind is FailureKind.CANCELLED
    assert all(outcome.delivered for outcome in ends.values()), ends
    d.wait(Released, count=8)
    for i in set(range(8)) - {victim}:
        assert np.array_equal(d.block(31 - 2 * i), p.block(2 * i))
        assert np.array_equal(d.block(30 - 2 * i), p.block(2 * i + 1))
