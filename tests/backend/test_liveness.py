"""What the ends of a link on one host tell each other."""

import errno
import multiprocessing
import os
import socket

import pytest

from kvxfer.backend.door import knock
from kvxfer.backend.liveness import BINDING_BYTES, MAX_HEARD
from kvxfer.errors import TransportError
from tests.backend.conftest import Side


def test_messages_come_in_order_with_their_descriptors(sides: tuple[Side, Side]) -> None:
    here, there = sides
    mine = here.connect(there)
    mine.tell(b"early")  # before the peer has connected
    theirs = there.connect(here)
    read, write = os.pipe()
    mine.tell(b"memory", write)
    os.close(write)
    there.go_on()
    assert theirs.up and [message for message, _ in theirs.heard] == [b"early", b"memory"]
    (_, (taken,)) = theirs.heard.pop()
    os.write(taken, b"it is the same pipe")
    os.close(taken)
    assert os.read(read, 100) == b"it is the same pipe"
    os.close(read)
    theirs.tell(b"back")
    here.go_on()
    assert mine.heard.popleft() == (b"back", [])


def test_what_was_told_before_the_end_is_heard_and_descriptors_nobody_takes_are_closed(
    sides: tuple[Side, Side],
) -> None:
    here, there = sides
    mine, theirs = here.connect(there), there.connect(here)
    there.go_on()
    read, write = os.pipe()
    mine.tell(b"last", write)
    os.close(write)
    here.links.hang_up(mine)
    theirs.check()
    assert theirs.down is not None and [message for message, _ in theirs.heard] == [b"last"]
    there.go_on()
    assert os.read(read, 1) == b""  # nobody has the other end of the pipe any more
    os.close(read)
    with pytest.raises(OSError, match="closed on this side"):
        mine.tell(b"too late")


def test_an_end_that_is_told_too_much_is_down(sides: tuple[Side, Side]) -> None:
    here, there = sides
    mine, theirs = here.connect(there), there.connect(here)
    there.go_on()
    for _ in range(MAX_HEARD + 1):
        mine.tell(b"x")
    theirs.check()
    assert theirs.down is not None and len(theirs.heard) == MAX_HEARD


def test_an_end_that_cannot_connect_can_still_be_withdrawn(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no descriptor is left, nothing of it remains: least of all that of the peer, who was there first."""
    here, there = sides
    theirs = there.connect(here)
    here.go_on()

    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "no descriptor is left")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no descriptor"):
        patched.setattr(socket, "socket", none_left)
        here.connect(there)
    here.links.withdraw(here.end)
    there.go_on()
    assert theirs.down is not None


@pytest.mark.parametrize("early", [True, False], ids=["before we connect", "after"])
def test_ends_of_two_control_connections_are_no_link(sides: tuple[Side, Side], early: bool) -> None:
    """Somebody has carried the endpoints of two processes to each other."""
    here, there = sides
    if early:
        here.connect(there, b"one" * 5)
        there.go_on()
        with pytest.raises(TransportError, match="control connection"):
            there.connect(here, b"another")
        assert there.links.unused(there.end)
        return
    mine = here.connect(there, b"one" * 5)
    theirs = there.connect(here, b"another")
    mine.tell(b"what is not for that peer")
    for side in (here, there):
        side.go_on()
    for end in (mine, theirs):
        assert not end.up and end.down is not None and not end.heard
    assert "control connection" in f"{mine.down} {theirs.down}"  # the other may have heard first that its peer is gone


def test_a_peer_elsewhere_without_a_key_is_not_here(sides: tuple[Side, Side]) -> None:
    here, there = sides
    with here.links.connected_if_here(here.end, there.end, there.links.name, "the peer", None) as found:
        assert found is None


def test_a_process_makes_no_link_to_itself(sides: tuple[Side, Side]) -> None:
    """As when a router sends a request back to the engine that has computed it; the error says so."""
    here, _ = sides
    with pytest.raises(TransportError, match="the peer is this process itself"):
        here.links.connect(here.end, here.end, here.links.name, "the peer")


def test_who_has_overheard_a_link_is_not_its_peer(sides: tuple[Side, Side]) -> None:
    """Another process says all that the peer would."""
    here, there = sides
    line = here.connect(there)
    stranger = multiprocessing.get_context("fork").Process(
        target=lambda: knock(here.links.name, "the victim").send(here.end + there.end + bytes(BINDING_BYTES))
    )
    stranger.start()
    stranger.join()
    here.go_on()
    assert stranger.exitcode == 0 and not line.up
