"""A space that fails or breaks its contract: an error at start, or a failed transfer, that names it and comes at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.engine.exchange import Step
from kvxfer.engine.worker import WorkerSide
from kvxfer.errors import KvxferError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Region
from kvxfer.identity import TransferId
from kvxfer.memory import Space, SpaceError, registry
from kvxfer.memory.cpu import CpuSpace
from kvxfer.schedule import StepCommands
from kvxfer.values import BlockTable, Fetch, Offer
from tests.control.conftest import Ended, SeededEngine, until
from tests.memory.island import install

SHAPE = (2, 8, 4, 64)
STAGING = 1 << 20


class RaisingFence:
    event = None

    def passed(self) -> bool:
        raise RuntimeError("the device fell off the bus")


class TinSpace(CpuSpace):
    """Host memory under another name, by rows alone; each test breaks it in one way."""

    pack, unpack, prepare_checksum = Space.pack, Space.unpack, Space.prepare_checksum
    prepare_unpack, by_itself = Space.prepare_unpack, False

    @classmethod
    def allocate(cls, nbytes: int, device: str = "tin:0") -> TinSpace:
        return cls((tin(np.zeros(nbytes, np.uint8)),), device)

    @classmethod
    def allocate_host(cls, nbytes: int) -> Space:
        return CpuSpace.allocate(nbytes)


def tin(array: Any) -> Region:
    return Region(array.ctypes.data, array.nbytes, "tin:0").kept_by(array)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(install(tmp_path / "site", "tin", f"{__name__}:TinSpace")))
    registry.space_for.cache_clear()
    yield
    registry.space_for.cache_clear()


def raising(*_: Any) -> Any:
    raise RuntimeError("bent")


def nothing(*_: Any) -> Any:
    return None


def cache_on(device: str) -> tuple[Any, Cache]:
    memory = np.random.default_rng(len(device)).integers(0, 256, SHAPE, dtype=np.uint8)
    made = Cache.of_tensors(memory, "layer block token unit")
    return memory, made if device == "cpu" else Cache((tin(memory),), made.groups, made.views)


def engine(name: str, device: str, **more: Any) -> SeededEngine:
    settings = Config.from_mapping({"backend": "tcp", "integrity": "full", "staging_bytes": STAGING, **more})
    return SeededEngine(settings, SimpleNamespace(caches=[cache_on(device)[1]]), name=name)  # type: ignore[arg-type]


def failed(p: SeededEngine, d: SeededEngine, within: float) -> Failure:
    """Have ``d`` fetch from ``p``; return why that fails, within so many seconds."""
    transfer = TransferId("own/1/bad", 0)
    d.agents[0].fetch(Fetch("r", transfer, b"d", p.source, BlockTable.of([[1, 2]]), 0, 8, None))
    p.agents[0].offer(Offer(transfer, b"d", 1, 8, BlockTable.of([[3, 5]]), True))
    found: list[Ended] = []
    until(lambda: found.extend(e for e in d.events() if isinstance(e, Ended)) or found, within)  # type: ignore[func-returns-value]
    failure = found[0].outcome.failure
    assert failure is not None
    return failure


def attribute(call: str, value: Any) -> Any:
    return classmethod(value) if call in ("allocate_host", "remaps", "fence") else value


@pytest.mark.parametrize(
    ("call", "value", "words"),
    [
        ("gather", raising, "failed in checksum: RuntimeError: bent"),
        ("prepare_checksum", nothing, "failed in checksum: TypeError"),
        ("remaps", nothing, "returned None from remaps, which must be True or False"),
        ("remaps", raising, "failed in remaps: RuntimeError: bent"),
        ("allocate_host", nothing, "returned None from allocate_host, which must be a Space"),
        ("allocate_host", raising, "failed in allocate_host: RuntimeError: bent"),
        ("allocate_host", lambda cls, n: CpuSpace.allocate(n // 2), r"returned memory of \d+ bytes from allocate_host"),
        ("__init__", raising, "failed in its constructor: RuntimeError: bent"),
        ("__init__", nothing, "does not call Space.__init__"),
    ],
)
def test_an_agent_does_not_start_and_says_why(
    call: str, value: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinSpace, call, attribute(call, value))
    with pytest.raises(SpaceError, match=words) as caught:
        engine("p", "tin:0")
    said = str(caught.value)
    assert said.startswith(f"the space for tin:0 ({__name__}:TinSpace) ")
    assert said.endswith("; `kvxfer conformance --space tin` tests it")


def test_an_agent_does_not_wait_for_ever_for_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    works = threading.Event()
    monkeypatch.setattr(TinSpace, "gather", lambda *_: works.wait(60))
    monkeypatch.setattr("kvxfer.control.agent.START_S", 0.2)
    with pytest.raises(KvxferError, match=r"memory of tin:0 could not be read within 0\.2 s.*'integrity'"):
        engine("p", "tin:0")
    works.set()


@pytest.mark.parametrize(
    ("where", "call", "value", "words"),
    [
        ("producer", "pack", raising, "failed in pack: RuntimeError: bent"),
        ("producer", "pack", nothing, "returned None from pack, which must be a fence"),
        ("producer", "pack", lambda *_: RaisingFence(), "RuntimeError: the device fell off the bus"),
        ("consumer", "unpack", nothing, "returned None from unpack, which must be a fence"),
        ("consumer", "prepare_unpack", raising, "failed in prepare_unpack: RuntimeError: bent"),
        ("consumer", "prepare_unpack", nothing, "failed in unpack: TypeError"),
        ("consumer", "scatter", raising, "failed in unpack: RuntimeError: bent"),
    ],
)
def test_a_transfer_fails_at_once_and_says_why(
    where: str, call: str, value: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = (engine(name, "tin:0" if name == where else "cpu") for name in ("producer", "consumer"))
    try:
        monkeypatch.setattr(TinSpace, call, value)
        failure = failed(p, d, 5)
        assert failure.kind is FailureKind.BACKEND_FAILED
        assert "the space for tin:0" in failure.detail and words in failure.detail, failure
    finally:
        p.close()
        d.close()


class Hanging:
    """A device that does nothing of what it is given, in its queue or in the call itself, until it is let go."""

    event = None

    def __init__(self) -> None:
        self.going = threading.Event()

    def passed(self) -> bool:
        return self.going.is_set()

    def queued(self, *_: Any) -> Hanging:
        return self

    def call(self, *_: Any) -> Hanging:
        self.going.wait(60.0)
        return self


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    device = Hanging()
    yield device
    device.going.set()


@pytest.mark.parametrize(
    ("where", "call", "how", "words", "logged"),
    [
        ("producer", "pack", "queued", "the producer has packed nothing more of it", "has not finished a piece of"),
        ("producer", "pack", "call", "the producer has packed nothing more of it", "has not come back from a call for"),
        ("consumer", "unpack", "queued", "this engine's device does not finish a piece", "has not finished a piece of"),
        ("consumer", "unpack", "call", "device has not come back from a call", "has not come back from a call for"),
    ],
)
def test_a_device_that_hangs_is_not_the_link_s_fault(
    where: str,
    call: str,
    how: str,
    words: str,
    logged: str,
    hanging: Hanging,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    more = {"transfer_timeout": 5.0, "abort_timeout": 1.0, "peer_timeout": 20.0}
    p, d = (engine(name, "tin:0" if name == where else "cpu", **more) for name in ("producer", "consumer"))
    try:
        monkeypatch.setattr(TinSpace, call, getattr(hanging, how))
        monkeypatch.setattr(TinSpace, "prepare_unpack", Space.prepare_unpack)
        failure = failed(p, d, 9)
        assert failure.kind is FailureKind.TIMED_OUT
        assert words in failure.detail and "link" not in failure.advice and "device" in failure.advice, failure
        until(lambda: logged in caplog.text)
    finally:
        hanging.going.set()
        p.close()
        d.close()


def test_a_step_goes_on_if_the_device_gives_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read before it is computed: the offers of the step are withdrawn."""
    revoked: list[str] = []
    offered: list[Offer] = []
    agent: Any = SimpleNamespace(
        offer=lambda offer, after: offered.append(offer), revoke=lambda *args: revoked.append(args[2])
    )
    side: Any = SimpleNamespace(_payloads={}, _device="tin:0", agent=agent, _own=lambda blocks: blocks)
    monkeypatch.setattr(TinSpace, "fence", classmethod(nothing))
    offers = [Offer(TransferId(f"own/1/{i}", 0), b"d", 1, 8, BlockTable.of([[3, 5]]), True) for i in range(2)]
    WorkerSide.after_forward(side, Step(StepCommands(offers=tuple(offers))))
    assert not offered and len(revoked) == 2
    assert "returned None from fence, which must be a fence" in revoked[0]
