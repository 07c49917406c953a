"""Threads that wait on flags outlive the end of the interpreter, and never touch a descriptor that is another's by then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from kvxfer.flag import Flag

BEGIN = """
import atexit, os, threading, time

others = []

def late():  # registered first, so that it runs after all that the interpreter ends with
    for _ in range(32):
        others.append(os.eventfd(7, os.EFD_NONBLOCK))
    time.sleep(0.3)
    left = [os.eventfd_read(fd) for fd in others]
    print("untouched" if left == [7] * 32 else left, flush=True)

atexit.register(late)
"""

WAITS = {
    "events": """
from kvxfer.control.events import EventQueue
queue = EventQueue()
def go_on():
    queue.end()
    queue.take(0.01)
""",
    "sockets": """
from kvxfer.control.sockets import ControlSockets
from kvxfer.security import OPEN
sockets = ControlSockets(OPEN)
def go_on():
    sockets._asleep = True
    sockets.wake()
    sockets.poll(0.01)
""",
    "side channel": """
from kvxfer.engine.side_channel import WorkerChannel
channel = WorkerChannel(print, lambda: ())
def go_on():
    channel.wake()
    time.sleep(0.001)
""",
    "wakeup": """
from kvxfer.backend.wakeup import Wakeup
wakeup = Wakeup()
def go_on():
    wakeup.set()
    wakeup.clear()
""",
}

END = """
def run():
    while True:
        go_on()

threading.Thread(target=run, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("what", WAITS)
def test_a_process_ends_cleanly_while_a_thread_waits(what: str) -> None:
    code = BEGIN + WAITS[what] + END
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "untouched", "")


def event_at(number: int) -> int:
    """Return a new event's descriptor, of this number if that is free, else of a greater one; others may have closed theirs meanwhile."""
    below = []
    while (found := os.eventfd(7, os.EFD_NONBLOCK)) < number:
        below.append(found)
    for descriptor in below:
        os.close(descriptor)
    return found


def test_a_flag_that_is_closed_touches_nothing() -> None:
    flag = Flag()
    flag.set()
    flag.close()
    other = event_at(flag.fileno())
    assert other == flag.fileno(), "its number is free"
    flag.set()
    flag.clear()
    flag.close()
    assert os.eventfd_read(other) == 7
    os.close(other)


def test_a_flag_may_be_set_by_a_handler_that_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, write = Flag(), os.eventfd_write

    def interrupted(fd: int, value: int) -> None:
        monkeypatch.setattr(os, "eventfd_write", write)
        flag.set()
        waiting = threading.Thread(target=flag.clear)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", interrupted)
    flag.set()
    assert os.eventfd_read(flag.fileno()) == 1
    flag.clear()


@pytest.mark.parametrize("call", ["set", "clear"])
def test_a_flag_that_is_closed_amid_a_call_keeps_its_descriptor_until_that_ends(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = Flag()
    name = "eventfd_write" if call == "set" else "eventfd_read"
    original = getattr(os, name)

    def slow(fd: int, *value: int) -> object:
        closing = threading.Thread(target=flag.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "nobody waits for another's system call"
        other = event_at(fd)
        os.close(other)
        assert other != fd, "the number is still this flag's"
        return original(fd, *value)

    monkeypatch.setattr(os, name, slow)
    getattr(flag, call)()
    monkeypatch.undo()
    other = event_at(flag.fileno())
    assert other == flag.fileno(), "closed once nobody uses it"
    getattr(flag, call)()
    assert os.eventfd_read(other) == 7
    os.close(other)
