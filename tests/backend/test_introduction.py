"""Who is told the address by which shared memory is reached, and whose is believed."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest

from kvxfer.backend.introduction import Introduction
from kvxfer.backend.passed import MAX_BYTES, passed
from kvxfer.backend.process import PeerProcess
from kvxfer.errors import PeerError
from tests.backend.conftest import Side
from tests.descriptors import open_files


@pytest.fixture
def met(sides: tuple[Side, Side]) -> tuple[Side, Side]:
    here, there = sides
    here.connect(there), there.connect(here)
    return sides


def test_each_has_the_others_address_once_both_have_said_yes(met: tuple[Side, Side]) -> None:
    here, there = met
    mine = Introduction(here.line, lambda: b"of this one")
    mine.hear()
    assert mine.willing and not mine.over
    theirs = Introduction(there.line, lambda: b"of the other" * 50_000)
    for side, introduction in ((here, mine), (there, theirs)):
        side.go_on()
        introduction.hear()
        assert introduction.over
    assert (mine.address, theirs.address) == (b"of the other" * 50_000, b"of this one")


@pytest.mark.parametrize("why", ["it has none", "the peer is another's", "it is too long"])
def test_if_one_says_no_neither_has_an_address(
    met: tuple[Side, Side], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = met
    for side in met:
        side.go_on()
    before = len(open_files())
    theirs = Introduction(there.line, lambda: b"of the other")
    address: Any = {"it has none": None, "it is too long": lambda: bytes(MAX_BYTES + 1)}.get(why, lambda: b"mine")
    if why == "the peer is another's":
        monkeypatch.setattr(PeerProcess, "equals_us", lambda self: False)
    mine = Introduction(here.line, address)
    assert mine.over and not mine.willing, "nothing need be waited for"
    for side, introduction in ((here, mine), (there, theirs)):
        side.go_on()
        introduction.hear()
        assert introduction.over and introduction.address is None
    assert len(open_files()) == before, "what the peer has passed is closed"


def file_on_disk() -> int:
    with tempfile.TemporaryFile() as file:
        file.write(b"secret")
        return os.dup(file.fileno())


def half_a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


@pytest.mark.parametrize(
    "said",
    [
        lambda line: line.tell(b"Y"),
        lambda line: line.tell(b""),
        lambda line: line.tell(b"N", passed(b"address", "test")),
        lambda line: line.tell(b"Y", passed(b"one", "test"), passed(b"two", "test")),
        lambda line: line.tell(b"Y", file_on_disk()),
        lambda line: line.tell(b"Y", half_a_pipe()),
        lambda line: line.tell(b"Y", passed(bytes(MAX_BYTES + 1), "test")),
        lambda line: (line.tell(b"N"), line.tell(b"N")),
    ],
    ids=["no file", "nothing", "no with a file", "two files", "a file on disk", "a pipe", "too much", "twice"],
)
def test_what_makes_no_sense_ends_the_link(met: tuple[Side, Side], said: Any) -> None:
    here, there = met
    mine = Introduction(here.line, lambda: b"mine")
    said(there.line)
    here.go_on()
    with pytest.raises(PeerError):
        mine.hear()
    assert mine.address is None


def test_a_peer_that_ends_before_it_has_said_anything(met: tuple[Side, Side]) -> None:
    here, there = met
    mine = Introduction(here.line, lambda: b"mine")
    there.links.hang_up(there.line)
    here.go_on()
    with pytest.raises(PeerError, match="is gone"):
        mine.hear()
