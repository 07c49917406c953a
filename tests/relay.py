"""A stranger on the way between two processes: it keeps what passes, may change it, stand still, and cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Relay"]

Change = Callable[[bytes, int], bytes]
"""Takes bytes that pass and how many have before them, and returns what goes on in their place."""


class Relay:
    """TCP between a port of its own and a target.

    Args:
        target: ``tcp://HOST:PORT`` of who is dialled for each connection that comes.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        address: The same as ``tcp://127.0.0.1:PORT``.
        asked: What has come from those who dialled, before it was changed.
        answered: What has come from the target.
        change_asked: Changes what goes to the target.
        change_answered: Changes what goes to those who dialled.
    """

    def __init__(self, target: str) -> None:
        self.lead(target)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.asked, self.answered = bytearray(), bytearray()
        self.change_asked: Change = lambda data, at: data
        self.change_answered: Change = self.change_asked
        self._open: list[socket.socket] = []
        self._flow = threading.Event()
        self._flow.set()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    @property
    def connections(self) -> int:
        """How many have been made, and not been cut by ``cut``."""
        return len(self._open) // 2

    def lead(self, target: str) -> None:
        """Lead connections that are made from now on there."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)

    def freeze(self) -> None:
        """Let nothing pass, neither bytes nor an end: connections are half open."""
        self._flow.clear()

    def thaw(self) -> None:
        """Let everything pass again, first what has come meanwhile."""
        self._flow.set()

    def cut(self) -> None:
        """Break all connections; new ones may be made."""
        cut, self._open = self._open, []
        for end in cut:
            with suppress(OSError):  # it has gone already
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more connections, and break all; its threads end."""
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # closing alone leaves the thread in ``accept``
        self._door.close()
        self.thaw()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._door.accept()[0]
                try:
                    far = socket.create_connection(self._target)
                except ConnectionRefusedError:
                    near.close()
                    continue
                self._open += [near, far]
                for source, sink, asks in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass, args=(source, sink, asks), name="relay", daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        kept = self.asked if asks else self.answered
        with suppress(OSError):  # cut
            while data := source.recv(1 << 16):
                at = len(kept)
                kept += data
                self._flow.wait()
                sink.sendall((self.change_asked if asks else self.change_answered)(data, at))
            self._flow.wait()  # an end does not pass either
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()  # the other thread, which may still read from the sink, closes that
