"""Threads of ours: daemons, which debuggers and ``top -H`` see by their names as well."""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["NamedThread", "name_this_thread"]

_LONGEST = 15
"""Characters that the kernel keeps of a thread's name."""


class NamedThread(threading.Thread):
    """A daemon thread whose name the kernel knows, too; made like any thread, with its name."""

    def run(self) -> None:
        """Do what the thread was made for."""
        name_this_thread()
        super().run()


def name_this_thread() -> None:
    """Tell the kernel what Python calls the current thread; where it does not take that, nothing is lost."""
    with suppress(OSError):
        path = f"/proc/self/task/{threading.get_native_id()}/comm"
        with open(path, "w") as file:
            file.write(threading.current_thread().name[:_LONGEST])
