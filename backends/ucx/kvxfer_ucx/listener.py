"""The end of a listener that somebody may be dialling.

UCX accepts connections in a thread of its own. One of which the first bytes have not come points to the listener, and if they
come after that was destroyed, while its worker is not, that thread reads freed memory; one that the worker has not looked
at is never closed, and keeps that thread spinning. UCX offers no way to ask for either, so this asks the system.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

__all__ = ["destroy"]

PATIENCE_TURNS, PAUSE_S = 250, 0.002
"""How long UCX's thread may take to close what was turned out. Counted in turns, so that a host that stands still for a
while does not use it up."""

MOST_PROGRESS = 1000
"""Calls in one turn, should UCX always find something more to do."""

_SO_ATTACH_FILTER = 26  # Linux, <asm-generic/socket.h>; not in Python's socket
_RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)  # a program for it, struct sock_filter: let no packet in

_kept: list[list[Any]] = []
# One reference more, so that the end of the process leaves to the system what is still in here.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))

_log = logging.getLogger("kvxfer.ucx")


def destroy(held: list[Any], late: list[Any]) -> None:
    """Let go of a listener, its worker and the worker's context: ``held``, in this order. On the data thread, once nothing
    else uses them. ``late``: the listener's callback puts the endpoints of those who dial here.

    Lets nobody in any more, and turns out who is inside. If that does not come to an end, all of it is kept for as long as
    the process lives: better that than memory which is read when it is free."""
    listener, worker, _ = held
    port = listener.port
    del listener
    for _ in range(PATIENCE_TURNS):
        for _ in range(MOST_PROGRESS):
            if not worker.progress_once():
                break
        while late:
            late.pop().close_blocking()
        if _vacant(port):
            del worker
            while held:
                del held[0]
            return
        time.sleep(PAUSE_S)
    _log.warning("UCX did not close the connections to port %d; they stay until this process ends", port)
    _kept.append(held)


def _vacant(port: int) -> bool:
    """Whether this process has no connection at this port; shuts it for new ones, and breaks off those that there are."""
    vacant = True
    try:
        for found in _sockets():
            with found, suppress(OSError):  # what cannot be asked has no port, or is not connected any more
                if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                    continue
                if found.getsockname()[1] != port:
                    continue
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    vacant &= not _somebody_waits(found)
                else:
                    vacant = False
                    found.shutdown(socket.SHUT_RDWR)
    except OSError:  # there is no /proc here, or there are no descriptors left
        return False
    return vacant


def _somebody_waits(listener: socket.socket) -> bool:
    """Whether somebody is at the door whom UCX has not let in yet; shuts the door before looking."""
    program = ctypes.create_string_buffer(_RETURN_0, len(_RETURN_0))
    with suppress(OSError):  # where the system has no filters, some may come in yet
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    door = select.poll()  # select would not take high numbers
    door.register(listener, select.POLLIN)
    return bool(door.poll(0))


def _sockets() -> Iterator[socket.socket]:
    """This process's sockets, by descriptors of our own, since the others may be closed and used anew meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError as e:
            if e.errno == errno.EBADF:  # closed since
                continue
            raise
        try:
            found = socket.socket(fileno=fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
        except OSError:  # of a kind that has no address
            found = None
        if found is not None:
            yield found
        else:
            os.close(fd)
