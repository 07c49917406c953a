"""The threads of kvxfer: daemons, whose names debuggers and ``top -H`` show as well. And which processes Ctrl-C reaches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["NamedThread", "name_this_thread", "without_interrupts"]

_LONGEST = 15
"""The number of characters of a thread's name that the kernel keeps."""


class NamedThread(threading.Thread):
    """A daemon thread whose whole name the kernel knows too.

    Args:
        target: The function to run.
        args: Its arguments.
        name: Up to 15 characters, because ``top`` and debuggers would show no more.

    Raises:
        ValueError: The name is longer.
    """

    def __init__(self, target: Callable[..., None], name: str, args: tuple[Any, ...] = ()) -> None:
        if len(name) > _LONGEST:
            raise ValueError(f"the kernel keeps {_LONGEST} characters of a thread's name, and {name!r} has more")
        super().__init__(target=target, args=args, name=name, daemon=True)

    def run(self) -> None:
        name_this_thread()
        super().run()


def name_this_thread() -> None:
    """Tell the kernel Python's name of the current thread, if it takes one."""
    with suppress(OSError):
        path = f"/proc/self/task/{threading.get_native_id()}/comm"
        with open(path, "w") as file:
            file.write(threading.current_thread().name[:_LONGEST])


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C (SIGINT) from the processes that this thread starts within the block, and ends itself."""
    from multiprocessing import resource_tracker  # imported here because engines do not need it

    resource_tracker.ensure_running()  # which multiprocessing starts before its first process, and then lets interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
