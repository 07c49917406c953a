"""Those who connect and say nothing, and a process that has no descriptor left for them."""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from kvxfer.backend import Wakeup
from kvxfer.backend.door import MAX_STRANGERS, REST_S, UnixDoor


class Door:
    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.unix = UnixDoor("test", self.wakeup)

    def knock(self) -> socket.socket:
        knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        knocking.settimeout(5)
        knocking.connect(f"\0{self.unix.name}")
        return knocking

    def turn(self) -> list[socket.socket]:
        return [found for key in self.wakeup.clear() if (found := self.unix.answer(key)) is not None]

    @property
    def awake(self) -> bool:
        return bool(select.select([self.wakeup.fileno()], [], [], 0)[0])


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.unix.close()
    door.wakeup.close()


def test_of_many_who_say_nothing_the_oldest_go(door: Door) -> None:
    with ExitStack() as stack:
        silent = []
        for _ in range(MAX_STRANGERS + 2):
            silent.append(stack.enter_context(door.knock()))
            door.turn()
        gone = [s for s in silent if select.select([s], [], [], 0)[0]]
        assert gone == silent[:2] and not door.awake
        silent[-1].send(b"hello")
        (heard,) = door.turn()
        assert stack.enter_context(heard).recv(16) == b"hello"


def test_who_comes_when_no_descriptor_is_left_waits_for_one(door: Door) -> None:
    """And does not keep the thread awake until there is one."""
    with ExitStack() as stack:
        knocking = stack.enter_context(door.knock())
        taken: list[int] = []
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (knocking.fileno() + 64, before[1]))
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        try:
            assert door.awake and door.turn() == []
            assert not door.awake
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in taken:
                os.close(fd)
        time.sleep(2 * REST_S)
        knocking.send(b"hello")
        assert door.turn() == []
        while not (heard := door.turn()):
            assert door.awake
        assert stack.enter_context(heard[0]).recv(16) == b"hello"
