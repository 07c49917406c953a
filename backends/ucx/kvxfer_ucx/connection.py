"""An endpoint of ucxx: how it greets, how it breaks, how it is closed."""

from __future__ import annotations

from typing import Any

from kvxfer_ucx.library import Library
from kvxfer_ucx.messages import Messages, Posted

__all__ = ["Connection"]


class Connection:
    """A connected (or connecting) endpoint, created with error handling. All methods on the data thread.

    The side that dialled greets with the bytes by which the other side finds out what the connection is for. They go
    by UCX's stream, which belongs to an endpoint; tags, which all else uses, belong to the whole worker.
    """

    def __init__(self, library: Library, messages: Messages, endpoint: Any) -> None:
        self._library = library
        self._messages = messages
        self._endpoint = endpoint
        self._greeting: tuple[Any, bytearray] | None = None
        self._closing: Posted | None = None
        # Told by UCX within progress, where nothing else is allowed. The callback must not hold on to us, or the
        # endpoint, and all that it belongs to, would live until the next garbage collection.
        broken: list[bool] = []
        self._broken = broken

        def break_() -> None:
            broken.append(True)
            messages.news = True

        try:
            endpoint.set_close_callback(break_)
        except RuntimeError:  # it is closed already
            break_()

    @property
    def handle(self) -> int:
        """The ``ucp_ep_h``; not to be used once ``trouble`` or ``close`` said that it is gone."""
        return int(self._endpoint.handle)

    def greet(self, greeting: bytes) -> None:
        buffer = bytearray(greeting)
        self._greeting = self._endpoint.stream_send(self._library.array(buffer)), buffer

    def expect(self, nbytes: int) -> None:
        """Begin to wait for a greeting of this length."""
        buffer = bytearray(nbytes)
        self._greeting = self._endpoint.stream_recv(self._library.array(buffer)), buffer

    def greeting(self) -> bytes | None:
        """The greeting, once it is there."""
        if self._greeting is None or not self._greeting[0].completed:
            return None
        request, buffer = self._greeting
        try:
            request.check_error()
        except self._library.ucxx.UCXError:
            return None  # the endpoint broke, and says so itself
        return bytes(buffer)

    def trouble(self) -> str | None:
        """Why the connection is broken, in UCX's words; ``None`` while it is not."""
        if not self._broken:
            return None
        try:
            self._endpoint.raise_on_error()
        except self._library.ucxx.UCXError as e:
            return f"{e} ({type(e).__name__})"
        return "the endpoint was closed"

    def close(self) -> None:
        """Close at once, without regard for what is in flight: UCX ends it with an error."""
        if self._closing is not None:
            return
        if self._broken:
            # ucxx takes an endpoint that failed for closed and leaves it to leak.
            self._closing = self._messages.close(self.handle)
        else:
            self._endpoint.remove_close_callback()
            self._endpoint.close_blocking()
            self._closing = Posted(self._messages)

    def closed(self) -> bool:
        """Whether nothing of it is in flight any more, after ``close``."""
        quiet = self._greeting is None or self._greeting[0].completed
        return quiet and self._closing is not None and self._closing.done()
