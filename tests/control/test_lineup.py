"""Several back ends in one agent (``backend: auto``): each link is made with the first that both have and that can."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from kvxfer.data.commands import Command, Disconnect, MakeEndpoint
from kvxfer.data.data_thread import DataThread
from kvxfer.data.plane import DataPlane
from kvxfer.errors import ConfigError, TransportError
from kvxfer.identity import TransferId
from kvxfer.protocol.values import LinkId
from kvxfer.testing.fake import FakeTransport
from kvxfer.transport import Completion, auto
from tests.conftest import require
from tests.control.conftest import SeededEngine, engine, fetch, offered

__all__ = ["engine"]


class Counted(FakeTransport):
    """Counts what is made of it, by the engine that it serves; those in ``lame`` cannot make links with it."""

    made: ClassVar[Counter[str]]
    linked: ClassVar[Counter[str]]
    lame: ClassVar[set[str]]
    ill: ClassVar[set[str]]

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self.engine = agent.partition("-")[0]
        self.made[self.engine] += 1

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self.linked[self.engine] += 1
        if self.engine in self.lame:
            raise TransportError("no way to that GPU")
        return super().connect(mine, theirs)

    def poll(self) -> list[Completion]:
        if self.engine in self.ill:
            self.ill.remove(self.engine)
            raise RuntimeError("the library is confused")
        return super().poll()


class Near(Counted):
    """Works within one ``network`` only, as those do that work on one host."""

    name = "near"


class Far(Counted):
    name = "far"


class Missing(Counted):
    name = "missing"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        raise TransportError("libfar.so: no such file")


OURS = {f"tests.control.test_lineup:{c.__name__}": c for c in (Near, Far, Missing)}
NEAR, FAR, MISSING = OURS


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Near, Far, Missing):
        cls.made, cls.linked, cls.lame, cls.ill = Counter(), Counter(), set(), set()
    order(monkeypatch, NEAR, FAR)


def order(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have these installed, and no others; ours come in this order, and before real ones."""
    monkeypatch.setattr(auto, "available", lambda: dict.fromkeys(names, ""))
    for place, cls in enumerate(OURS[name] for name in names if name in OURS):
        monkeypatch.setattr(cls, "costs", {"cpu": place})


Make = Callable[..., SeededEngine]


@pytest.fixture
def make(engine: Make) -> Make:  # noqa: F811
    def made(**config: Any) -> SeededEngine:
        return engine({"backend": "auto", **config.pop("options", {})}, seed=len(Near.made) + 1, **config)

    return made


def deliver(p: SeededEngine, d: SeededEngine, name: str) -> Any:
    t = TransferId(name, 0)
    d.agents[0].fetch(fetch(p.source, [5, 2], 8, transfer=t, handle=name))
    p.agents[0].offer(offered([3, 1], 8, transfer=t))
    end = d.over(name)
    if end.outcome.delivered:
        assert (d.block(5) == p.block(3)).all() and (d.block(2) == p.block(1)).all()
    return end.outcome


def test_nothing_of_later_ones_is_made_before_a_link_asks_for_it(make: Make) -> None:
    assert deliver(make(), make(), "x").delivered
    assert sum(Near.linked.values()) == 2 and not Far.made


@pytest.mark.parametrize("lame", ["engine0", "engine1"], ids=["producer", "consumer"])
def test_a_link_that_the_first_cannot_make_is_made_with_the_next(make: Make, lame: str) -> None:
    Near.lame = {lame}
    p, d = make(), make()
    for name in ("x", "y"):
        assert deliver(p, d, name).delivered
    assert Far.linked == {"engine0": 1, "engine1": 1}
    assert Near.linked[lame] == 1, "it is not tried again for every transfer"


def test_each_link_has_the_back_end_that_can_make_it(make: Make) -> None:
    """One consumer, one producer beside it and another on another host; each of the two back ends by a verb of its own."""
    here, there = (
        {NEAR: {"network": type(Near("probe", {})._net)(), "verbs": ["read"]}, FAR: {"verbs": ["send", "recv"]}}
        for _ in range(2)
    )
    d, p, q = make(options=here), make(options=here), make(options=there)
    for name in ("x", "y"):
        assert deliver(p, d, name + "p").delivered
        assert deliver(q, d, name + "q").delivered
    assert Far.linked == {"engine0": 1, "engine2": 1}


def test_the_reset_of_one_leaves_links_of_the_other_alone(make: Make) -> None:
    d, p, q = make(), make(), make()
    assert deliver(p, d, "xp").delivered
    Near.lame = {"engine2"}
    assert deliver(q, d, "xq").delivered
    before = Near.linked["engine1"], Far.made["engine0"]
    Far.ill = {"engine0"}
    assert deliver(q, d, "yq").delivered, "its transfer is taken up again"
    assert deliver(p, d, "yp").delivered
    assert (Near.linked["engine1"], Far.made["engine0"]) == (before[0], before[1] + 1)


def test_an_engine_starts_with_the_first_that_can(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose memory the preferred back end refuses to register."""
    order(monkeypatch, MISSING, FAR)
    p, d = make(), make()
    assert d.agents[0].descriptor.backends == ("far",)
    assert deliver(p, d, "x").delivered
    order(monkeypatch, MISSING)
    with pytest.raises(TransportError, match="libfar"):
        make()
    order(monkeypatch, NEAR, FAR)
    with pytest.raises(ConfigError, match="did you mean 'verbs'"):
        make(options={NEAR: {"verb": ["read"]}})


def test_when_none_can_make_the_link_all_reasons_are_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    order(monkeypatch, NEAR, MISSING)
    Near.lame = {"engine0"}
    p, d = make(), make()
    outcome = deliver(p, d, "x")
    assert not outcome.delivered
    detail = outcome.failure.detail
    assert "no way to that GPU" in detail and "libfar.so: no such file" in detail
    Near.lame = set()
    assert deliver(p, d, "y").delivered, "whoever comes later finds out anew"


def test_an_engine_that_names_one_meets_one_that_names_none(make: Make, engine: Make) -> None:  # noqa: F811
    assert deliver(engine({"backend": FAR}, seed=9), make(), "x").delivered
    assert deliver(make(), engine({"backend": FAR}), "y").delivered
    assert not Near.linked


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_where_no_thread_is_to_be_had_for_another_back_end_the_load_ends_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """As where the limit of processes is reached for a while."""
    p, d = make(transfer_timeout=60.0, peer_timeout=30.0), make(transfer_timeout=60.0, peer_timeout=30.0)
    Near.lame = {"engine0", "engine1"}
    start, others = threading.Thread.start, ["another"] * (side == "producer")

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvxfer-data":
            if not others:
                others.append("for whoever comes later")
                raise RuntimeError("can't start new thread")
            others.pop()
        start(thread)

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        assert "can't start new thread" in str(deliver(p, d, "x").failure)
    assert deliver(p, d, "y").delivered


class Told:
    """A mover that notes what it is told."""

    def __init__(self, name: str, notes: list[tuple[str, Command | None]]) -> None:
        self._name, self._notes = name, notes

    def begin(self) -> None:
        self._notes.append((self._name, None))

    def post(self, command: Command) -> None:
        self._notes.append((self._name, command))

    def exposes(self, link: LinkId) -> bool:
        return False


def test_a_link_waits_with_the_next_back_end_for_the_end_of_the_last() -> None:
    """Else the answer to a later closing would be taken for that to an earlier, with memory still written to."""
    notes: list[tuple[str, Command | None]] = []

    def told(name: str) -> DataThread:
        return Told(name, notes)  # type: ignore[return-value]

    data, closing = DataPlane(("near", "far"), told, lambda *_: pytest.fail("not asked for")), Disconnect("link")
    first, second, third = (
        MakeEndpoint("link", number, backend, "consumer") for number, backend in ((1, "near"), (2, "far"), (3, "far"))
    )
    data.post(first)
    data.post(closing)
    data.post(second)
    assert notes == [("near", first), ("near", closing)]
    data.post(closing)
    data.post(third)
    assert not data.disconnected("link") and notes[-1] == ("near", closing)
    assert data.disconnected("link")
    assert notes[-2:] == [("far", None), ("far", third)]
    data.post(closing)
    assert notes[-1] == ("far", closing) and data.disconnected("link")


@pytest.mark.parametrize("real", ["zmq", "nixl", "cma"])
def test_real_ones_stand_by(make: Make, monkeypatch: pytest.MonkeyPatch, real: str) -> None:
    require(real)
    order(monkeypatch, NEAR, real)
    Near.lame = {"engine1"}
    p, d = (make(transfer_timeout=60.0, peer_timeout=20.0) for _ in range(2))  # NIXL takes its time to start
    for name in ("x", "y"):
        assert deliver(p, d, name).delivered
    assert d.agents[0].stats().quarantined_bytes == 0
