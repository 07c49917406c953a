"""The listener, and the connections that have not shown a token yet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from kvxfer import clock
from kvxfer.backend.door import accept, listen
from kvxfer.backend.endpoint import TOKEN_BYTES
from kvxfer.backend.wakeup import Wakeup
from kvxfer_tcp.connection import Connection, Loop, tune
from kvxfer_tcp.options import Options
from kvxfer_tcp.vectors import Pipe
from kvxfer_tcp.wire import FRAME_BYTES, GREETING_BYTES, Header, Kind, greeting

AT_ONCE = 64
"""Connections that are accepted in one call of ``poll``."""

STRANGERS = 128
"""Connections that have not shown a token yet; a further one takes the place of the one that has waited longest."""


class Door:
    """Hands ``admit`` the token that a connection has shown, its socket, and which one of its link it is."""

    def __init__(self, loop: Loop, options: Options, admit: Callable[[bytes, socket.socket, int], None]) -> None:
        """Listen.

        Raises:
            OSError: Not at this address or port.
        """
        self._loop, self._options, self._admit = loop, options, admit
        self._strangers: dict[_Stranger, float] = {}
        self.listener = listen(options.listen, options.port)
        self.port: int = self.listener.getsockname()[1]

    @property
    def due(self) -> float | None:
        """When to call ``expire``, though no descriptor tells."""
        return next(iter(self._strangers.values()), None)

    def accept(self, wakeup: Wakeup) -> None:
        """Take in new connections."""
        for _ in range(AT_ONCE):
            opened = accept(self.listener, wakeup)
            if opened is None:
                return
            try:
                tune(opened, self._options, False)
            except OSError:
                opened.close()
                continue  # that one has gone again
            if len(self._strangers) >= STRANGERS:
                self.turn_away(next(iter(self._strangers)))
            self._strangers[_Stranger(self._loop, opened, self)] = clock.now() + self._options.connect_timeout_s

    def expire(self, now: float) -> None:
        """Turn those away who have shown no token in time."""
        for stranger in [s for s, due in self._strangers.items() if due <= now]:
            self.turn_away(stranger)

    def turn_away(self, stranger: _Stranger) -> None:
        """Close a connection; its peer is told nothing."""
        self._strangers.pop(stranger, None)
        stranger.close()

    def introduce(self, stranger: _Stranger, token: bytes, number: int) -> None:
        """Pass on a connection that has said what a peer of ours would."""
        del self._strangers[stranger]
        self._loop.forget(stranger)
        self._admit(token, stranger.pipe.socket, number)

    def close(self) -> None:
        """Listen no more."""
        self.listener.close()
        for stranger in list(self._strangers):
            self.turn_away(stranger)


class _Stranger(Connection):
    """A connection that has shown no token. Of what it sends, a greeting and a header are read, and nothing more."""

    def __init__(self, loop: Loop, opened: socket.socket, door: Door) -> None:
        super().__init__(loop, Pipe(opened))
        self._door, self._said = door, b""

    def lost(self, error: Exception) -> None:
        self._door.turn_away(self)

    def step(self) -> bool:
        if not self.readable:
            return False
        said = self.pipe.read(GREETING_BYTES + FRAME_BYTES - len(self._said))
        if said is None:
            self.readable = False
            return False
        self._said += said
        token = self._said[GREETING_BYTES - TOKEN_BYTES : GREETING_BYTES]
        if not greeting(token).startswith(self._said[:GREETING_BYTES]):
            self._door.turn_away(self)
            return False
        if len(self._said) < GREETING_BYTES + FRAME_BYTES:
            return True
        with suppress(ValueError):
            header = Header.decode(self._said[GREETING_BYTES:])
            if header.kind is Kind.HELLO:
                self._door.introduce(self, token, header.chunk)
                return False
        self._door.turn_away(self)
        return False
