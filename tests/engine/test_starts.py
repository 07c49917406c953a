"""Who waits for which producer to begin, for how long, and how often that is asked; the clock is played."""

from __future__ import annotations

from kvxfer.engine.starts import Starts
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Await, Named

A, B = Source("a", 7, 1), Source("b", 8, 0)
X, Y = TransferId("router/x", 0), TransferId("router/y", 0)


class Played:
    def __init__(self) -> None:
        self.now, self.told = 0.0, list[tuple[Source, Await]]()
        self.starts = Starts(30.0, lambda source, notice: self.told.append((source, notice)), lambda: self.now)

    def drain(self) -> list[tuple[Source, Await]]:
        told, self.told = self.told, []
        return told


def test_a_request_waits_until_its_producer_has_begun_with_it() -> None:
    p = Played()
    for request, transfer, source in (("r", X, A), ("sibling", X, A), ("other", Y, A)):
        p.starts.ask(request, transfer, b"d", source)
    assert p.drain()[0] == (A, Await(1, (Named(X, b"d"),)))
    p.starts.begun((Named(X, b"another prompt's"),))
    assert "r" in p.starts and "sibling" in p.starts
    p.starts.begun((Named(X, b"d"),))
    assert "r" not in p.starts and "sibling" not in p.starts and "other" in p.starts


def test_it_is_asked_again_while_there_is_no_answer() -> None:
    p = Played()
    p.starts.ask("r", X, b"d", A)
    p.starts.ask("r", X, b"d", A)
    p.starts.ask("q", Y, b"e", A)
    assert len(p.drain()) == 2
    p.now = 0.5
    p.starts.ask_again()
    assert not p.drain()
    p.now = 1.5
    p.starts.ask_again()
    p.starts.ask_again()
    assert p.drain() == [(A, Await(1, (Named(X, b"d"), Named(Y, b"e"))))]


def test_it_waits_for_so_long_and_no_longer() -> None:
    p = Played()
    p.starts.ask("r", X, b"d", A)
    p.now = 29.9
    assert not p.starts.late("r")
    p.now = 30.0
    assert p.starts.late("r")
    p.starts.forget("r")
    assert "r" not in p.starts and len(p.starts) == 0


def test_who_cannot_be_asked_is_not_waited_for() -> None:
    p = Played()
    p.starts.ask("r", X, b"d", A)
    p.starts.ask("q", Y, b"e", B)
    p.starts.unheard("a", 7)
    assert "r" not in p.starts and "q" in p.starts
