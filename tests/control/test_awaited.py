"""What directories say to each other of transfers whose producers have still to begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.notices import Unheard
from kvxfer.control.sockets import ControlSockets
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Await, Begun, Named, OtherContent
from tests.control.conftest import until

X, Y = TransferId("router/x", 0), TransferId("router/y", 0)


class Pair:
    def __init__(self, p: Directory, d: Directory) -> None:
        self.p, self.d, self.heard = p, d, list[object]()
        self.known = {Y: b"e"}
        p.begun = lambda transfer, digest: self.known.get(transfer) == digest

    def ask(self, *named: Named, epoch: int | None = None) -> None:
        at = self.p.source
        self.d.tell(at, Await(at.epoch if epoch is None else epoch, named))

    def hears(self, *named: Named) -> bool:
        self.heard += self.d.notices()
        return {n for notice in self.heard if isinstance(notice, Begun) for n in notice.transfers} == set(named)

    def settle(self) -> None:
        """All that was said before has been taken in: the answer to one more question is here."""
        self.ask(Named(Y, b"e"))
        until(lambda: any(Named(Y, b"e") in getattr(n, "transfers", ()) for n in self.all()))

    def all(self) -> list[object]:
        self.heard += self.d.notices()
        return self.heard


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(*(stack.enter_context(Directory(Config(), name)) for name in "pd"))


def test_whoever_asks_before_the_producer_begins_is_told_when_it_does(pair: Pair) -> None:
    pair.ask(Named(X, b"d"))
    pair.settle()
    assert pair.hears(Named(Y, b"e"))
    pair.known[X] = b"d"
    pair.p.begins(X, b"d")
    until(lambda: pair.hears(Named(X, b"d"), Named(Y, b"e")))


def test_a_beginning_amid_the_directory_s_turn_needs_no_later_occasion(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had waited until the directory's thread woke for something else, or for a second, which is a minute here."""
    poll = ControlSockets.poll
    monkeypatch.setattr(ControlSockets, "poll", lambda self, seconds: poll(self, 60.0 if seconds > 0.5 else seconds))
    pair.ask(Named(X, b"d"))
    pair.settle()
    known = pair.p.begun

    def begun(transfer: TransferId, digest: bytes) -> bool:
        pair.known[X] = b"d"
        pair.p.begins(X, b"d")
        return known(transfer, digest)

    pair.p.begun = begun
    pair.ask(Named(Y, b"e"))
    until(lambda: pair.hears(Named(X, b"d"), Named(Y, b"e")))


def test_a_beginning_for_which_nobody_waits_wakes_no_thread(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.settle()
    woken = list[object]()
    monkeypatch.setattr(ControlSockets, "wake", lambda sockets: woken.append(sockets))
    pair.known[X] = b"d"
    pair.p.begins(X, b"d")
    monkeypatch.undo()
    pair.ask(Named(X, b"d"))
    until(lambda: pair.hears(Named(X, b"d"), Named(Y, b"e")))
    assert not woken


def test_whoever_asks_after_that_is_told_at_once(pair: Pair) -> None:
    pair.ask(Named(Y, b"e"), epoch=0)  # a router does not know it
    until(lambda: pair.hears(Named(Y, b"e")))


@pytest.mark.parametrize("first", ["the question", "the beginning"])
def test_who_means_another_prompt_hears_that_and_no_more(
    pair: Pair, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    """He need not wait until he gives up; he does not learn whose prompt it is."""
    pair.p.differs = lambda transfer, digest: pair.known.get(transfer) not in (None, digest)
    if first == "the beginning":
        pair.known[X] = b"d"
    pair.ask(Named(X, b"another"))
    if first == "the question":
        pair.settle()
        pair.known[X] = b"d"
        pair.p.begins(X, b"d")
    until(lambda: OtherContent((Named(X, b"another"),)) in pair.all())
    assert not any(isinstance(n, Begun) and n.transfers[0].transfer == X for n in pair.all())
    until(lambda: "router/x#0 and computes it" in caplog.text)


def test_who_means_another_engine_hears_nothing(pair: Pair) -> None:
    pair.ask(Named(X, b"d"), epoch=pair.p.epoch + 1)
    pair.settle()
    pair.known[X] = b"d"
    pair.p.begins(X, b"d")
    pair.heard.clear()
    pair.settle()
    assert pair.hears(Named(Y, b"e"))


def test_a_directory_without_an_engine_s_word_holds_nobody_up(pair: Pair) -> None:
    """As of a program that offers what it has without a scheduler side."""
    with Directory(Config(), "plain") as plain:
        pair.d.tell(plain.source, Await(plain.epoch, (Named(X, b"d"),)))
        until(lambda: pair.hears(Named(X, b"d")))


def test_of_a_directory_that_is_not_there_one_hears_that(pair: Pair) -> None:
    gone = Directory(Config(), "gone")
    gone.close()
    at = gone.source
    pair.d.tell(Source(at.host, at.port, 0), Await(0, (Named(X, b"d"),)))
    until(lambda: Unheard(at.host, at.port) in pair.all())


def test_of_a_directory_whose_name_nobody_knows_one_hears_that(pair: Pair) -> None:
    pair.d.tell(Source("gone.invalid", 1, 0), Await(0, (Named(X, b"d"),)))
    until(lambda: Unheard("gone.invalid", 1) in pair.all())


def test_what_strangers_await_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        monkeypatch.setattr("kvxfer.control.directory.MAX_AWAITED", 8)
        p = stack.enter_context(Directory(Config(), "small"))
        other = Pair(p, stack.enter_context(Directory(Config(), "d")))
        for i in range(100):
            other.ask(Named(TransferId("router/flood", i), b"d"))
        other.ask(Named(X, b"d"))
        other.settle()
        assert len(p._awaited) <= 8
        other.known[X] = b"d"
        p.begins(X, b"d")
        until(lambda: other.hears(Named(X, b"d"), Named(Y, b"e")))
