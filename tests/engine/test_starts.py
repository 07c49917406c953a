"""Who waits for which producer to begin, for how long, and how often that is asked; the clock is played."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer import clock
from kvxfer.config import Config
from kvxfer.control.notices import Declined, Unheard
from kvxfer.engine.notices import MAX_EARLY, Notices
from kvxfer.engine.starts import Starts
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Await, Begun, Named, OtherContent
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.schedule import Load, LoadState, Schedule
from kvxfer.values import Group
from tests.schedule.ends import Loading, Offers

A, B = Source("a", 7, 1), Source("b", 8, 0)
X, Y = TransferId("router/x", 0), TransferId("router/y", 0)


class PlayedDirectory:
    """Tells nobody, and has the notices that a test gives it."""

    def __init__(self) -> None:
        self.came: list[Any] = []

    def tell(self, source: Source, notice: object) -> None:
        pass

    def notices(self) -> list[Any]:
        came, self.came = self.came, []
        return came


class Played:
    latest: Played

    def __init__(self) -> None:
        self.now, self.told = 1.0, list[tuple[Source, Await]]()
        Played.latest = self
        self.starts = Starts(30.0, lambda source, notice: self.told.append((source, notice)))
        self.schedule = Schedule([Group(16)])
        self.directory: Any = PlayedDirectory()
        self.notices = Notices(Config(), self.directory, self.schedule)

    def drain(self) -> list[tuple[Source, Await]]:
        told, self.told = self.told, []
        return told

    def ask(self, request: str, transfer: TransferId, digest: bytes, source: Source) -> Load:
        consumer = Loading(self.schedule.consumer)
        assert consumer.arrive(request, transfer, digest, source, 40, begun=False)
        load = consumer.of(request)
        assert load is not None
        load.came_at = self.now
        self.starts.ask((load,))
        return load

    def again(self) -> None:
        self.starts.ask(self.schedule.consumer)

    def hear(self, notice: object) -> None:
        self.directory.came.append(notice)
        self.notices.exchange()

    def waits(self, request: str) -> bool:
        load = Loading(self.schedule.consumer).of(request)
        return load is not None and load.state is LoadState.WAITING


@pytest.fixture(autouse=True)
def time_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: Played.latest.now)


def test_a_request_waits_until_its_producer_has_begun_with_it() -> None:
    p = Played()
    for request, transfer, digest, source in (("r", X, b"d", A), ("sibling", X, b"d", A), ("other", Y, b"d", A)):
        p.ask(request, transfer, digest, source)
    assert p.drain()[0] == (A, Await(1, (Named(X, b"d"),)))
    p.hear(Begun((Named(X, b"another prompt's"),)))
    assert p.waits("r") and p.waits("sibling")
    p.hear(Begun((Named(X, b"d"),)))
    assert not p.waits("r") and not p.waits("sibling") and p.waits("other")


def test_a_request_whose_name_stands_for_other_content_does_not_wait() -> None:
    p = Played()
    load = p.ask("r", X, b"d", A)
    p.ask("other", Y, b"d", A)
    p.hear(OtherContent((Named(X, b"another"), Named(Y, b"another"))))
    assert p.waits("r")
    p.hear(OtherContent((Named(X, b"d"),)))
    assert not p.waits("r") and p.waits("other")
    assert load.failure is not None and load.failure.kind is FailureKind.DIGEST_DIFFERS


def test_it_is_asked_again_while_there_is_no_answer() -> None:
    p = Played()
    p.ask("r", X, b"d", A)
    p.again()
    p.ask("q", Y, b"e", A)
    assert len(p.drain()) == 2
    p.now = 1.5
    p.again()
    assert not p.drain()
    p.now = 2.5
    p.again()
    p.again()
    assert p.drain() == [(A, Await(1, (Named(X, b"d"), Named(Y, b"e"))))]


def test_it_waits_for_so_long_and_no_longer() -> None:
    p = Played()
    load = p.ask("r", X, b"d", A)
    p.now = 30.9
    assert not p.starts.is_late(load)
    p.now = 31.0
    assert p.starts.is_late(load)
    Loading(p.schedule.consumer).finish("r")
    assert not p.waits("r") and len(p.schedule) == 0


def test_who_cannot_be_asked_is_not_waited_for() -> None:
    p = Played()
    p.ask("r", X, b"d", A)
    p.ask("q", Y, b"e", B)
    p.hear(Unheard("a", 7))
    assert not p.waits("r") and p.waits("q")


def declines(*named: Named, host: str = "d") -> Declined:
    return Declined(PeerIdentity(host), named, "not wanted", "")


def test_an_offer_under_the_name_of_one_that_is_over_has_yet_to_begin() -> None:
    """Whoever fetched at once would be told that the transfer is over."""
    p = Played()
    p.directory.begins = lambda transfer, digest: None
    assert not p.directory.begun(X, b"d")
    p.notices.over(X, b"d")
    assert p.directory.begun(X, b"d"), "fetching tells the rest"
    Offers(p.schedule.producer).arrive("again", X, b"d", 40)
    assert not p.directory.begun(X, b"d")


def test_one_host_s_early_refusals_do_not_push_out_another_s() -> None:
    """Neither by very many, nor by as many names of peers as it likes: of a host's names only its address is proved."""
    p = Played()
    names = [TransferId("router/made up", i) for i in range(3 * MAX_EARLY)]
    p.directory.came = [declines(Named(X, b"d"), Named(Y, b"e"))]
    p.directory.came += [declines(*[Named(name, b"x") for name in names], host="greedy")]
    p.notices.exchange()
    for transfer, digest in ((X, b"d"), (Y, b"e")):
        assert Offers(p.schedule.producer).arrive(str(transfer), transfer, digest, 40)
        p.notices.offered(transfer, digest)
        assert not p.schedule.producer.offers(transfer, digest)
    assert len(p.notices._early) <= MAX_EARLY


def test_what_was_declined_before_it_was_offered() -> None:
    """What is said a thousand times counts once; whoever names other content under the same name changes nothing."""
    p = Played()
    for early, stands in (([declines(Named(X, b"another"))], True), ([declines(Named(X, b"digest"))] * 1000, False)):
        p.directory.came = early
        p.notices.exchange()
        assert Offers(p.schedule.producer).arrive("r", X, b"digest", 40)
        p.notices.offered(X, b"digest")
        assert p.schedule.producer.offers(X, b"digest") is stands
        p.schedule.producer.withdraw(X, "the next case")
