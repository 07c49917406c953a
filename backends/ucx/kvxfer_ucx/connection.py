"""A UCX worker of its own for every link, and its one endpoint: how it comes up, how it breaks, how it goes."""

from __future__ import annotations

from typing import Any

from kvxfer import clock
from kvxfer.errors import PeerError, TransportError
from kvxfer_ucx.library import Library
from kvxfer_ucx.messages import Messages, News, Posted


class Connection:
    """All that UCX has for one link. All methods on the data thread.

    The worker serves no other link, so that nothing which arrives for one meets another; and when it is destroyed, UCX has
    forgotten all of it. The peers learn the addresses of each other's workers over the control connection: there is no
    listener that a stranger could dial, and where UCX is left with shared memory, no port at all.
    """

    def __init__(self, library: Library, context: Any, news: News) -> None:
        """Make the worker.

        Raises:
            TransportError: UCX cannot.
        """
        self._library = library
        self._endpoint: Any = None
        self._closing: Posted | None = None
        # Told by UCX within progress, where nothing else is allowed. The callback must not hold on to us, or the
        # endpoint, and all that it belongs to, would live until the next garbage collection.
        self._broken: list[bool] = []
        try:
            self._worker = library.ucxx.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
        except library.ucxx.UCXError as e:
            raise TransportError(f"UCX cannot make a worker: {e}") from e
        self._news = news
        self.messages = Messages(library.ucp, self._worker.handle, news)
        self.address = bytes(self._worker.address)

    @property
    def epoll(self) -> int:
        """Readable, once ``arm`` has been true, when ``progress`` has something to do."""
        return int(self._worker.epoll_file_descriptor)

    @property
    def handle(self) -> int:
        """The ``ucp_ep_h``; not to be used once ``trouble`` or ``close`` said that it is gone."""
        return int(self._endpoint.handle)

    def connect(self, address: bytes) -> None:
        """Make the endpoint that leads to a peer's worker. Once only.

        Raises:
            PeerError: There is no way to it.
        """
        # UCX ends the process for an address whose first byte, its version and flags, is none that it could have made.
        if not address or address[0] != self.address[0]:
            raise PeerError("its address does not fit this UCX; are both of one release, and set up alike?")
        ucxx, broken, news = self._library.ucxx, self._broken, self._news
        try:
            theirs = ucxx.UCXAddress.create_from_buffer(address)
            self._endpoint = ucxx.UCXEndpoint.create_from_worker_address(self._worker, theirs, True)
        except (ucxx.UCXError, ValueError) as e:
            raise PeerError(f"{e} ({type(e).__name__})") from None

        def break_() -> None:
            broken.append(True)
            news.arrived = True

        try:
            self._endpoint.set_close_callback(break_)
        except RuntimeError:  # it is closed already
            break_()

    def progress(self, until: float) -> bool:
        """Let UCX work until it has nothing more to do, or until then; whether it had anything to do."""
        step, moved = self._worker.progress_once, False
        while step():
            moved = True
            if clock.now() > until:
                break
        return moved

    def arm(self) -> bool:
        """Have ``epoll`` tell of what comes; false when something has come already."""
        return bool(self._worker.arm())

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
        self._closing = Posted(self.messages)
        if self._endpoint is None:
            return
        if self._broken:
            # ucxx takes an endpoint that failed for closed and leaves it to leak.
            self._closing = self.messages.close(self.handle)
        else:
            self._endpoint.remove_close_callback()
            self._endpoint.close_blocking()

    def closed(self) -> bool:
        """Whether the endpoint is gone, after ``close``."""
        return self._closing is not None and self._closing.done()

    def destroy(self) -> None:
        """Give all of it back, once nothing is in flight any more."""
        self._endpoint = None
        # ucxx receives what nobody has, and waits until it has come: of a peer that is gone, for ever.
        self.messages.discard(0, 0)
        self._worker = None
