"""Any consumer may ask for checksums of all that it reads: one that reads again and again keeps its own parts waiting, not others'."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvxfer.data import hasher
from kvxfer.identity import TransferId
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.values import Hash, Hashed, PartRef
from kvxfer.testing.engine import PagedMemory
from tests.control.conftest import until

GREEDY, HONEST = PeerIdentity("10.0.0.1", "greedy"), PeerIdentity("10.0.0.2", "honest")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a hasher that hashes nothing before ``go`` is set, and the list of what it has hashed."""
    go, done = threading.Event(), list[PartRef]()

    class Space:
        def checksum(self, plan: Any, side: str) -> Any:
            go.wait(60.0)
            return type("Made", (), {"value": 1})

    monkeypatch.setattr(hasher.memory, "space", lambda regions: Space())
    made = hasher.Hasher(
        PagedMemory().caches[0], lambda said: done.append(said.ref) if isinstance(said, Hashed) else None
    )
    yield made, go, done
    go.set()
    made.close(5.0)


def part(i: int, peer: PeerIdentity, name: str = "") -> Hash:
    who = PeerIdentity(peer.host, name or peer.engine, peer.key)
    return Hash(
        PartRef("producer", b"%d %s" % (i, who.host.encode()), TransferId("own/1/x", i), 1, 0), None, "source", who
    )  # type: ignore[arg-type]


def test_peers_take_turns_whatever_links_and_names_they_have(order: Any) -> None:
    made, go, done = order
    greedy = [part(i, GREEDY, f"name {i}") for i in range(50)]
    honest = [part(i, HONEST) for i in range(3)]
    for action in (*greedy, *honest):
        made.hash(action)
    go.set()
    until(lambda: len(done) == 53)
    assert max(done.index(action.ref) for action in honest) <= 6
    assert [ref for ref in done if ref in {a.ref for a in greedy}] == [a.ref for a in greedy], (
        "each one's stay in order"
    )


def test_what_is_given_up_is_hashed_no_more_and_answered_once(order: Any) -> None:
    made, go, done = order
    first, second, third = (part(i, GREEDY) for i in range(3))
    for action in (first, second, third):
        made.hash(action)
    made.cancel(second.ref)
    assert done == [second.ref]
    made.cancel(second.ref)
    go.set()
    until(lambda: len(done) == 3)
    assert done == [second.ref, first.ref, third.ref]
