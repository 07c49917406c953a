"""Integrity: bytes that change on the way are noticed, whatever moves them and however they lie; right bytes never fail."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.errors import TransportError
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.memory import Checksum
from kvxfer.memory.cpu import CpuSpace
from kvxfer.protocol import parts
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing.engine import AgentEngine
from kvxfer.testing.fake import FakeTransport, Network
from kvxfer.values import BlockTable, Fetch, Offer
from tests.control.conftest import fetch, offered
from tests.geometry.engines import Case, cases
from tests.geometry.test_law import links, plan

T = TransferId("own/1/checked", 0)
FAKE = "kvxfer.testing.fake:FakeTransport"
WAYS = {
    "read": {"verbs": ["read"]},
    "write": {"verbs": ["write"]},
    "sendrecv": {"verbs": ["send", "recv"]},
    "all": {},
    "staged read": {"verbs": ["read"], "gathers": False},
    "staged write": {"verbs": ["write"], "gathers": False},
    "staged sendrecv": {"verbs": ["send", "recv"], "gathers": False},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def spoilt(options, how):
    """A back end that spoils what it brings: the fake by itself, or anything inside ``faults``."""
    if how == "fake":
        return {**options, "corrupt": 1.0}
    inner = {"inner": "zmq"} if options is None else {"inner": FAKE, "inner_options": options}
    return {"backend": "kvxfer.testing.faults:Faulty", **inner, "corrupt": 1.0}


def move(p, d, tokens=11):
    """One transfer; returns how it ended on both sides, released on both."""
    p.agents[0].offer(offered([3, 1, 7], tokens, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], tokens, transfer=T))
    (end,), (sent,) = d.wait(Ended), p.wait(Ended)
    d.wait(Released)
    p.wait(Released)
    return end, sent


def right(p, d):
    return all(np.array_equal(d.block(a), p.block(b)) for a, b in ((5, 3), (2, 1)))


@pytest.mark.parametrize("integrity", ["sample", "full"])
@each_way
def test_right_bytes_pass(engine, way, integrity):
    p, d = engine(dict(way), seed=1, integrity=integrity), engine(dict(way), integrity=integrity)
    end, sent = move(p, d)
    assert end.outcome.delivered and sent.outcome.delivered and right(p, d)
    assert p.agents[0].stats().corrupt == d.agents[0].stats().corrupt == 0


@pytest.mark.parametrize("spoilt", [False, True])
@each_way
def test_what_is_hashed_goes_in_several_parts(engine, way, spoilt, monkeypatch):
    """So that one is read while the next one moves; each counts."""
    monkeypatch.setattr(parts, "MIN_CHECKED", 16)
    net = Network()
    ends = [engine({**way, "network": net}, seed=seed, integrity="full") for seed in (1, None)]
    if spoilt:
        net.disturb("corrupt")
    end, _ = move(*ends)
    counted = [e.agents[0].stats() for e in ends]
    assert max(c.direct + c.staged for c in counted) > 1
    assert end.outcome.delivered == right(*ends) == (not spoilt), end
    assert not spoilt or end.outcome.kind is FailureKind.CORRUPT


@pytest.mark.parametrize("how", ["fake", "faults"])
@each_way
def test_full_notices_one_byte(engine, way, how):
    if how == "faults" and way.get("verbs") == ["write"]:
        pytest.skip("only bytes that a batch brings in are spoilt there")
    p, d = engine(spoilt(way, how), seed=1, integrity="full"), engine(spoilt(way, how), integrity="full")
    end, sent = move(p, d)
    assert end.outcome.kind is FailureKind.CORRUPT, end
    assert sent.outcome.kind is FailureKind.CORRUPT, sent
    assert not right(p, d)
    assert p.agents[0].stats().corrupt == d.agents[0].stats().corrupt == 1


class Slow(Checksum):
    """One that takes its time, as on a device. ``fails``: when it is asked whether it is done."""

    def __init__(self, checksum, fails):
        self.checksum, self.done, self.fails, self.fence = checksum, time.monotonic() + 0.02, fails, self
        self.event = None

    def passed(self):
        if self.fails:
            raise RuntimeError("the device fell off the bus")
        return time.monotonic() >= self.done

    @property
    def value(self):
        return self.checksum.value


@pytest.fixture
def device(monkeypatch):
    """Memory that a device reads by itself; lists the threads that have it read what has arrived. ``fails``: where the data thread
    does so, this does."""

    class Device(CpuSpace):
        by_itself, fails, readers = True, "", []  # noqa: RUF012

        def prepare_checksum(self, plan, side):
            thread = threading.current_thread().name
            fails = self.fails if thread == "kvxfer-data" else ""
            if side == "destination":
                self.readers.append(thread)
            if fails == "prepare":
                raise RuntimeError("out of memory")
            begin = super().prepare_checksum(plan, side)
            return lambda after: Slow(begin(after), fails == "passed") if fails != "begin" else 1 / 0

    monkeypatch.setattr("kvxfer.memory.space_for", lambda kind: Device)
    return Device


@pytest.mark.parametrize("corrupt", [False, True])
@each_way
def test_a_device_reads_by_itself_what_has_arrived(engine, device, way, corrupt):
    options = spoilt(way, "fake") if corrupt else way
    p, d = engine(dict(options), seed=1, integrity="full"), engine(dict(options), integrity="full")
    end, _ = move(p, d)
    assert end.outcome.delivered == right(p, d) == (not corrupt), end
    assert not corrupt or end.outcome.kind is FailureKind.CORRUPT
    written = (
        p.agents[0].stats().direct and not d.agents[0].stats().direct
    )  # then the consumer's data thread knows nothing
    assert device.readers == ["kvxfer-hash" if written else "kvxfer-data"]


@pytest.mark.parametrize("fails", ["prepare", "begin", "passed"])
def test_where_that_fails_it_is_read_all_the_same(engine, device, fails):
    device.fails = fails
    p, d = engine(dict(WAYS["read"]), seed=1, integrity="full"), engine(dict(WAYS["read"]), integrity="full")
    end, _ = move(p, d)
    assert end.outcome.delivered and right(p, d)
    assert device.readers[-1] == "kvxfer-hash"


class Fragile(FakeTransport):
    """Fails, and can not be made again, once it is ``broken``."""

    broken = False

    def __init__(self, agent, options):
        super().__init__(agent, options)
        if Fragile.broken:
            raise TransportError("it is broken")

    def poll(self):
        if Fragile.broken:
            raise RuntimeError("it is broken")
        return super().poll()


def test_what_is_being_read_is_given_back_though_the_back_end_is_gone(engine, device, monkeypatch):
    """It has arrived, and nobody but the device touches it."""
    monkeypatch.setattr(Fragile, "broken", False)
    config = {"backend": f"{__name__}:Fragile", "verbs": ["read"]}
    p, d = (engine(dict(config), seed=seed, integrity="full", transfer_timeout=2.0) for seed in (1, None))
    begin = Slow.__init__

    def broken(checksum, *args):
        if threading.current_thread().name == "kvxfer-data":
            Fragile.broken = True
        begin(checksum, *args)

    monkeypatch.setattr(Slow, "__init__", broken)
    p.agents[0].offer(offered([3, 1, 7], 11, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    d.wait(Ended)
    assert Fragile.broken
    d.wait(Released)


@pytest.mark.parametrize(("one", "other"), [("off", "full"), ("full", "off"), ("sample", "full")])
def test_the_stricter_side_has_its_way(engine, one, other):
    way = spoilt(WAYS["read"], "fake")
    p, d = engine(dict(way), seed=1, integrity=one), engine(dict(way), integrity=other)
    end, _ = move(p, d)
    assert end.outcome.kind is FailureKind.CORRUPT, end


@pytest.mark.parametrize("verbs", [["read"], ["send", "recv"]], ids=str)
def test_a_sample_notices_what_concerns_all_bytes(engine, verbs):
    """Packed pieces come as one run each, all of which is zeroed."""
    inner = {"inner": FAKE, "inner_options": {"verbs": verbs, "gathers": False}}
    options = {"backend": "kvxfer.testing.faults:Zeroing", **inner}
    config = {"integrity": "sample", "blocks": 128}
    p, d = engine(dict(options), seed=1, **config), engine(dict(options), **config)
    p.agents[0].offer(offered(list(range(100)), 400, transfer=T))
    d.agents[0].fetch(fetch(p.source, list(range(100)), 400, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.kind is FailureKind.CORRUPT, end
    d.wait(Released)


# --- any layouts, block sizes, tensor-parallel and pipeline sizes --------------------------------------------------


def ends(case: Case, options: dict[str, object], tail: bool = False) -> dict[object, Ended]:
    """How the case's transfer ends on every consumer rank, with real agents on all ranks."""
    config = Config.from_mapping(
        {"backend": FAKE, "backend_options": options, "integrity": "full", "staging_bytes": 1 << 20}
    )
    sides = (case.producer, case.consumer)
    caches = [[store.cache for store in side.stores.values()] for side in sides]
    with AgentEngine(config, caches=caches[0]) as p, AgentEngine(config, caches=caches[1]) as d:
        for agent in p.agents:
            agent.offer(Offer(T, b"d", 1, case.tokens, BlockTable.of(case.producer.tables), True))
        for agent in d.agents:
            blocks = BlockTable.of(case.consumer.tables)
            agent.fetch(Fetch("it", T, b"d", p.source, blocks, case.start, case.tokens, d.source, tail=tail))
        return {rank: d.over("it", 30.0, at) for at, rank in enumerate(case.consumer.stores)}


def fillable(case: Case) -> bool:
    """Return whether an agent takes a fetch of this: of one token at least, into blocks that are all there from ``start`` on."""
    tables = [np.asarray(table) for table in case.consumer.tables]
    groups = next(iter(case.consumer.stores.values())).cache.groups
    whole = all(
        (table[case.start // group.block_tokens : group.blocks(case.tokens)] >= 0).all()
        for table, group in zip(tables, groups, strict=True)
        if group.kind == "full"
    )
    return case.start < case.tokens and whole and any((table >= 0).any() for table in tables)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from(sorted(WAYS)), st.booleans())
def test_whatever_the_layouts_and_ranks(case: Case, way: str, tail: bool) -> None:
    """Checksums are of what is wanted; only a consumer that reads gets what the producer has behind that, if its last block is its own."""
    assume(fillable(case))
    case.fill()
    moving = {c for p, c, assignments in links(case) if plan(case, p, c, assignments).nbytes}
    expected = {rank: case.expect(store)[0] for rank, store in case.consumer.stores.items()}
    good = ends(case, dict(WAYS[way]), tail)
    assert all(e.outcome.delivered for e in good.values()), good
    for rank, store in case.consumer.stores.items():
        spared = (
            ~case.tail(store)
            if tail and "read" in WAYS[way].get("verbs", ["read"])
            else np.ones(len(store.image), bool)
        )
        assert np.array_equal(store.image[spared], expected[rank][spared])
    bad = ends(case, {**WAYS[way], "corrupt": 1.0})
    assert {rank for rank, e in bad.items() if not e.outcome.delivered} == moving, bad
    assert all(e.outcome.kind is FailureKind.CORRUPT for rank, e in bad.items() if rank in moving), bad
