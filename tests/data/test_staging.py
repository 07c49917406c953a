"""Parts that pass through staging memory: bounded slots, order, and what becomes of slots when things fail."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvxfer.config import SLOTS
from kvxfer.data.staging import Staging
from kvxfer.geometry import Cache, Planner, Region, route
from kvxfer.identity import TransferId
from kvxfer.memory.cpu import CpuSpace
from kvxfer.testing.clock import SetForward
from kvxfer.testing.fake import FakeTransport, Network
from tests.control.conftest import Ended, Released, fetch, meet, offered, until

STAGED = {"staging_bytes": SLOTS * 4096}


def transfers(n: int) -> list[TransferId]:
    return [TransferId("own/1/staged", i) for i in range(n)]


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_staged_and_direct_parts_keep_their_order_on_one_link(engine, verbs):
    """Rows of whole blocks go direct here, those of a partial last block do not; a part has more pieces than slots."""
    options = {"verbs": verbs, "run_bytes": 256}
    p, d = engine(dict(options), blocks=400, seed=1, **STAGED), engine(dict(options), blocks=400, **STAGED)
    names = transfers(12)
    for i, t in enumerate(names):
        blocks = list(range(32 * i, 32 * i + 32))
        tokens = 128 - i % 2
        d.agents[0].fetch(fetch(p.source, blocks[::-1], tokens, transfer=t, handle=str(i)))
        p.agents[0].offer(offered(blocks, tokens, transfer=t))
    ends = d.wait(Ended, count=len(names))
    assert all(e.outcome.delivered for e in ends), ends
    for i in range(len(names)):
        first = 32 * i
        assert np.array_equal(d.block(first + 31), p.block(first))
        assert np.array_equal(d.block(first)[:, :, :3], p.block(first + 31)[:, :, :3])


FAILURES = {"batch": 9, "peer_close": 9, "later": 9, "backend_reset": 2}
"""How often a part fails, by what makes it quiet: more often than there are slots, or than a back end is reset without a pause."""
EACH = [("batch", "read"), ("peer_close", "send recv"), ("later", "write"), ("backend_reset", "write")]


@pytest.mark.parametrize(
    ("quiet", "verbs"),
    [
        pytest.param(quiet, verbs.split(), marks=[] if (quiet, verbs) in EACH else pytest.mark.slow)
        for quiet in FAILURES
        for verbs in ("read", "write", "send recv")
    ],
)
def test_slots_come_back_after_failures(engine, verbs, quiet):
    net, failures = Network(), FAILURES[quiet]
    options = {"verbs": verbs, "gathers": False, "quiet": quiet, "network": net}
    p, d = (
        engine(dict(options), blocks=400, seed=seed, transfer_timeout=5.0, lease=10.0, **STAGED) for seed in (1, None)
    )
    for i, t in enumerate(transfers(failures)):
        net.disturb("fail", 1)
        p.agents[0].offer(offered(list(range(32)), 128, transfer=t))
        d.agents[0].fetch(fetch(p.source, list(range(32)), 128, transfer=t, handle=str(i)))
        d.wait(Ended, count=i + 1)  # failed, or tried again on a new link where the old one had to be closed
        d.wait(Released, count=i + 1)
    before = d.agents[0].stats()
    good = TransferId("own/1/good", 0)
    p.agents[0].offer(offered(list(range(32)), 128, transfer=good))
    d.agents[0].fetch(fetch(p.source, list(range(32)), 128, transfer=good))
    assert d.wait(Ended, count=failures + 1)[failures].outcome.delivered
    assert np.array_equal(d.block(31), p.block(31))
    d.wait(Released, count=failures + 1)
    p.wait(Released, count=failures + 1)
    after = d.agents[0].stats()
    assert after.quarantined_bytes == p.agents[0].stats().quarantined_bytes == 0
    assert (after.staged - before.staged, after.direct) == (1, 0)


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_slots_come_back_after_a_cancel(engine, verbs, caplog):
    """The consumer gives up while a piece is on its way for long, more often than there are slots."""
    net, times = Network(), 9
    net.delay_s = 60.0
    options = {"verbs": verbs, "gathers": False, "network": net}
    p, d = engine(dict(options), blocks=400, seed=1, **STAGED), engine(dict(options), blocks=400, **STAGED)
    for i, t in enumerate(transfers(times)):
        p.agents[0].offer(offered(list(range(32)), 128, transfer=t))
        d.agents[0].fetch(fetch(p.source, list(range(32)), 128, transfer=t, handle=str(i)))
        while d.agents[0].stats().staged <= i:
            time.sleep(0.001)
        d.agents[0].cancel(str(i), "client left")
        d.wait(Released, count=i + 1)
    net.delay_s = 0.0
    good = TransferId("own/1/good", 0)
    p.agents[0].offer(offered(list(range(32)), 128, transfer=good))
    d.agents[0].fetch(fetch(p.source, list(range(32)), 128, transfer=good))
    assert d.wait(Ended, count=times + 1)[times].outcome.delivered
    assert np.array_equal(d.block(31), p.block(31))
    assert "did not end within" not in caplog.text, "the batch is aborted, and no link is closed for it"


def test_a_cancelled_load_resets_no_back_end(engine, caplog):
    """The producer says when it writes no more, if it is given the time: the consumer's back end was reset at once, with all links."""
    options = {"verbs": ["write"], "gathers": False, "quiet": "later", "delay_s": 0.05}
    times = {"abort_timeout": 30.0, "peer_timeout": 60.0, "lease": 60.0, "transfer_timeout": 60.0}
    p, d = (engine(dict(options), blocks=400, seed=seed, **times, **STAGED) for seed in (1, None))
    for i, t in enumerate(transfers(3)):
        p.agents[0].offer(offered(list(range(64)), 256, transfer=t))
        d.agents[0].fetch(fetch(p.source, list(range(64)), 256, transfer=t, handle=str(i)))
        while not (d.agents[0].stats().staged > i and d.block(0).any()):
            time.sleep(0.001)
        d.agents[0].cancel(str(i), "its client left")
        for side in (p, d):
            side.wait(Released, count=i + 1)
        d.memory.arrays[0][:] = 0
    time.sleep(0.2)
    assert "resetting" not in caplog.text
    assert d.agents[0].stats().quarantined_bytes == 0


@pytest.mark.parametrize(("quiet", "staged"), [("batch", 0), ("peer_close", 0), ("later", 1), ("backend_reset", 1)])
def test_a_write_that_no_close_would_end_lands_in_staging(engine, quiet, staged):
    options = {"verbs": ["write"], "quiet": quiet, "run_bytes": 1}
    p, d = engine(dict(options), seed=1), engine(dict(options))
    p.agents[0].offer(offered([3, 1], 8, transfer=transfers(1)[0]))
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=transfers(1)[0]))
    assert d.wait(Ended)[0].outcome.delivered
    assert np.array_equal(d.block(5), p.block(3))
    assert (p.agents[0].stats().staged, d.agents[0].stats().staged) == (staged, staged)


def test_what_a_peer_already_has_a_slot_for_always_finds_one():
    """Or a circle of engines could wait for each other's slots: it has happened."""
    memory = np.zeros(SLOTS * 4096, np.uint8)
    staging = Staging((Region(memory.ctypes.data, memory.nbytes),), memory.nbytes, "cpu")
    links = [bytes([n]) for n in range(SLOTS)]
    held = [slot for link in links if (slot := staging.take(link, "producer")) is not None]
    held += [slot for link in links if (slot := staging.take(link, "consumer", sure=False)) is not None]
    assert 0 < len(held) < SLOTS
    sure = staging.take(links[-1], "consumer")
    assert sure is not None
    assert staging.take(links[-1], "consumer", sure=False) is None
    staging.give(sure)
    for slot in held:
        staging.give(slot)
    expected = [staging.take(link, "consumer") for link in links]
    assert staging.take(links[0], "producer") is not None, "nor may consumers keep producers from theirs"
    assert None in expected


@pytest.mark.parametrize("roles", [("producer", "consumer"), ("consumer", "producer")], ids=str)
def test_the_last_slot_is_for_a_link_that_has_none(roles):
    memory = np.zeros(SLOTS * 4096, np.uint8)
    staging = Staging((Region(memory.ctypes.data, memory.nbytes),), memory.nbytes, "cpu")
    for role in roles:
        while staging.take(b"link", role) is not None:
            pass
    assert staging.take(b"newcomer", roles[1]) is not None


def test_a_slot_that_is_being_packed_is_nobody_elses_after_a_reset(device):
    memory = np.zeros((1, 8, 4, 1024), np.uint8)
    cache = Cache.of_tensors(memory, "layer block token unit")
    plan = Planner(cache, cache, route([cache], [cache])[cache.rank].assignments[cache.rank]).plan([[0]], [[0]], 0, 4)
    staging = Staging(cache.regions, SLOTS * 4096, "cpu")
    free = device.hold(cache.regions[0].address, "pack")
    links = [bytes([n]) for n in range(SLOTS)]
    slot = staging.take(links[0], "producer")
    fence = staging.pack(plan, slot)
    staging.reset()
    taken = [staging.take(link, role) for role in ("producer", "consumer") for link in links]
    assert not fence.passed()
    assert sum(other is not None for other in taken) == SLOTS - 1
    assert slot.offset not in [other.offset for other in taken if other is not None]
    free.set()
    assert staging.wait(time.monotonic() + 30.0)
    assert staging.take(links[-1], "consumer").offset == slot.offset


def test_a_device_that_ends_while_the_process_stands_still_has_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, clock = np.zeros(SLOTS * 4096, np.uint8), SetForward()
    staging = Staging((Region(memory.ctypes.data, memory.nbytes),), memory.nbytes, "cpu")
    looks = iter([["a copy"], []])

    def stall() -> list[str]:
        clock.forward(60.0)
        return next(looks)

    monkeypatch.setattr(staging, "work", stall)
    with clock.installed():
        assert staging.wait(clock.now() + 30.0)


class Later:
    """The fence of what a device has been asked to do."""

    event, failed = None, False

    def __init__(self, future):
        self._future = future

    def passed(self):
        if self.failed:
            raise RuntimeError("the device has failed")
        return self._future.done()


@pytest.fixture
def device(monkeypatch):
    """Memory that is packed and unpacked by a device, in order, while the data thread goes on. ``takes``: seconds for each of the
    two, by the address of the cache; ``hold``: let one of the two not end before it is freed; ``begun``: what it was asked to do;
    ``done``: what it has done."""

    streams = []

    class Device(CpuSpace):
        by_itself, takes, held, begun, done = True, {}, {}, [], []  # noqa: RUF012

        def __init__(self, regions, *args, **kwargs):
            super().__init__(regions, *args, **kwargs)
            self.stream = ThreadPoolExecutor(1)
            streams.append(self.stream)

        def pack(self, *args):
            return self._later("pack", super().pack, *args)

        def unpack(self, *args):
            return self._later("unpack", super().unpack, *args)

        @classmethod
        def hold(cls, address, what):
            return cls.held.setdefault((address, what), threading.Event())

        def _later(self, what, act, *args):
            self.begun.append(what)

            def run():
                time.sleep(self.takes.get((self.regions[0].address, what), 0.0))
                if (self.regions[0].address, what) in self.held:
                    self.held[self.regions[0].address, what].wait(60)
                act(*args)
                self.done.append(what)

            return Later(self.stream.submit(run))

    monkeypatch.setattr("kvxfer.memory.space_for", lambda kind: Device)
    yield Device
    for held in Device.held.values():
        held.set()
    for stream in streams:  # what is still to be written must not meet memory that the engines have freed
        stream.shutdown()


def address(engine):
    return engine.agents[0].cache.regions[0].address


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_a_device_packs_and_unpacks_by_itself(engine, device, verbs):
    """More pieces than there are slots."""
    options = {"verbs": verbs, "gathers": False}
    p, d = engine(dict(options), blocks=400, seed=1, **STAGED), engine(dict(options), blocks=400, **STAGED)
    device.takes |= {(address(e), what): 0.002 for e in (p, d) for what in ("pack", "unpack")}
    blocks, t = list(range(128)), transfers(1)[0]
    p.agents[0].offer(offered(blocks, 512, transfer=t))
    d.agents[0].fetch(fetch(p.source, blocks[::-1], 512, transfer=t))
    assert d.wait(Ended)[0].outcome.delivered
    assert device.begun.count("pack") == device.begun.count("unpack") > SLOTS
    assert all(np.array_equal(d.block(127 - b), p.block(b)) for b in blocks)


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_a_slot_that_is_being_packed_is_nobody_elses(engine, device, verbs):
    """Given up by its transfer, it was lent to the next one, whose bytes the device then overwrote."""
    options = {"verbs": verbs, "gathers": False}
    a, b = (engine(dict(options), blocks=64, seed=seed, **STAGED) for seed in (1, 2))
    free, first = device.hold(address(a), "pack"), transfers(1)[0]
    a.agents[0].offer(offered([1], 4, transfer=first))
    b.agents[0].fetch(fetch(a.source, [9], 4, transfer=first))
    while "pack" not in device.begun:
        time.sleep(0.001)
    b.agents[0].cancel("req", "its client left")
    a.wait(Ended)
    for i in range(8):  # whatever slot it takes
        b.agents[0].offer(offered([30 + i], 4, transfer=TransferId("own/1/other", i)))
        a.agents[0].fetch(fetch(b.source, [20 + i], 4, transfer=TransferId("own/1/other", i), handle=str(i)))
    until(lambda: "unpack" in device.begun)  # which the device does after that
    free.set()
    ends = [e for e in a.wait(Ended, count=9) if e.role == "consumer"]
    assert all(e.outcome.delivered for e in ends), ends
    for i in range(8):
        assert np.array_equal(a.block(20 + i), b.block(30 + i))


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_blocks_that_are_being_packed_are_not_given_back(engine, device, verbs):
    """Pages of an elastic cache may be unmapped from then on, which ends an engine whose device still reads them."""
    options = {"verbs": verbs, "gathers": False}
    p, d = engine(dict(options), seed=1, **STAGED), engine(dict(options), **STAGED)
    device.takes[address(p), "pack"] = 0.5
    first = transfers(1)[0]
    p.agents[0].offer(offered([1], 4, transfer=first))
    d.agents[0].fetch(fetch(p.source, [9], 4, transfer=first))
    while "pack" not in device.begun:
        time.sleep(0.001)
    d.agents[0].cancel("req", "its client left")
    p.wait(Released)
    assert "pack" in device.done
    device.takes.clear()
    d.wait(Released)  # its word from the producer may come a moment later
    good = TransferId("own/1/good", 0)
    p.agents[0].offer(offered([1], 4, transfer=good))
    d.agents[0].fetch(fetch(p.source, [9], 4, transfer=good, handle="good"))
    assert d.wait(Ended, count=2)[1].outcome.delivered


def slow(engine, device, who, seconds):
    """A producer and a consumer amid a load, of whom one's device packs or unpacks for so many seconds."""
    options = {"verbs": ["read"], "gathers": False}
    p, d = (engine(dict(options), seed=seed, abort_timeout=0.2, **STAGED) for seed in (1, None))
    device.takes |= {(address(e), who): seconds for e in (p, d)}
    first = transfers(1)[0]
    p.agents[0].offer(offered([1], 4, transfer=first))
    d.agents[0].fetch(fetch(p.source, [9], 4, transfer=first))
    while who not in device.begun:
        time.sleep(0.001)
    return p, d


@pytest.mark.parametrize("who", ["pack", "unpack"])
def test_a_device_that_takes_its_time_costs_no_link(engine, device, caplog, who):
    """The load is cancelled meanwhile. The link was closed for it, and then the back end, which does not make a device end."""
    p, d = slow(engine, device, who, 1.5)
    d.agents[0].cancel("req", "its client left")
    for side in (p, d):
        side.wait(Released)
    assert who in device.done
    assert "closing its link" not in caplog.text and "resetting" not in caplog.text


@pytest.mark.parametrize("who", ["pack", "unpack"])
def test_a_device_that_fails_keeps_nothing(engine, device, monkeypatch, who):
    p, d = slow(engine, device, who, 1.0)
    monkeypatch.setattr(Later, "failed", True)
    d.agents[0].cancel("req", "its client left")
    for side in (p, d):
        side.wait(Released)


def break_while_unpacking(p, d, device, monkeypatch, times):
    """A transfer that fails since the consumer's back end raises, so often, once the device has been asked to unpack."""
    poll, failed, free = FakeTransport.poll, [], device.hold(address(d), "unpack")

    def fail(transport):
        if "unpack" in device.begun and transport.agent.startswith("engine1") and len(failed) < times:
            failed.append(True)
            raise RuntimeError("it broke")
        return poll(transport)

    monkeypatch.setattr(FakeTransport, "poll", fail)
    t = transfers(1)[0]
    p.agents[0].offer(offered([3], 4, transfer=t))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=t))
    assert not d.wait(Ended)[0].outcome.delivered
    assert failed
    return free


@pytest.mark.parametrize("times", [1, math.inf], ids=["opened again", "down"])
@pytest.mark.parametrize("patience", [0.2, 60.0], ids=["not waited for", "waited for"])
def test_blocks_and_slots_come_back_once_the_device_ends(engine, device, monkeypatch, times, patience):
    """The back end breaks while the device unpacks. A reset waits for it in bounded time; the blocks may be written until it has
    ended, were given back before, and were kept for ever where it had not ended within that time."""
    options = {"verbs": ["read"], "gathers": False}
    times_out = {"transfer_timeout": 3.0, "abort_timeout": patience, "peer_timeout": 60.0}
    p, d = (engine(dict(options), blocks=400, seed=seed, **times_out, **STAGED) for seed in (1, None))
    meet(d, p)
    free = break_while_unpacking(p, d, device, monkeypatch, times)
    if patience < 1:
        until(lambda: d.agents[0].stats().quarantined_bytes > 0)
    assert not [e for e in d.events() if isinstance(e, Released)]
    free.set()
    d.wait(Released)
    assert np.array_equal(d.block(5), p.block(3)), "it was given back before the device was done"
    assert d.agents[0].stats().quarantined_bytes == 0
    if times == 1:
        more = TransferId("own/1/more", 0)
        p.agents[0].offer(offered(list(range(128)), 512, transfer=more))
        d.agents[0].fetch(fetch(p.source, list(range(200, 328)), 512, transfer=more, handle="more"))
        assert d.wait(Ended, count=2)[1].outcome.delivered
