"""The mover: the data thread as others see it.

The control thread posts commands and gets results through a callback; neither ever waits for the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvxfer.data.command_queue import CommandQueue
from kvxfer.data.data_thread import DataThread
from kvxfer.data.results import Result
from kvxfer.data.staging import Staging
from kvxfer.geometry import Region
from kvxfer.protocol.values import LinkId, Move, PartRef, Role
from kvxfer.transport import Capabilities, Transport

__all__ = ["Mover"]

log = logging.getLogger("kvxfer.mover")


class Mover:
    """The data thread of one back end, as other threads see it.

    Begin with ``start`` or ``begin``; all other methods may be called from any thread and wait for nothing, save
    ``close``.

    Args:
        name: The back end's name.
        make: Builds the back end, on the data thread (again after a reset).
        regions: The cache's memory, number 0.
        stage: Makes staging memory, number 1, given the back end's capabilities.
        post: Called on the data thread with each result; must not block.
        grace: Seconds within which a batch must end after its abort.
        quarantine_limit: Bytes of memory that is not quiet above which the back end is reset.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Transport],
        regions: tuple[Region, ...],
        stage: Callable[[Capabilities], Staging],
        post: Callable[[Result], None],
        grace: float,
        quarantine_limit: int,
    ) -> None:
        self._inbox = CommandQueue()
        self._data = DataThread(name, make, regions, stage, post, grace, quarantine_limit)
        self._thread = threading.Thread(target=self._data.run, args=(self._inbox,), name="kvxfer-data", daemon=True)

    def start(self, timeout: float) -> tuple[Capabilities, Staging]:
        """Make the back end, and wait for it, ``timeout`` seconds at most. If this raises, ``close``.

        Raises:
            TimeoutError: It takes longer.
            Exception: What the back end's constructor or ``stage`` raised.
        """
        self.begin()
        if not self._data.ready.wait(timeout):
            raise TimeoutError(f"the back end did not start within {timeout:g} s")
        return self.made

    def begin(self) -> None:
        """Begin to make the back end. If that fails, every endpoint is answered with the reason."""
        self._thread.start()

    @property
    def made(self) -> tuple[Capabilities, Staging]:
        """The capabilities and staging memory of a back end that has started; raises what kept it from that."""
        data = self._data
        if data.failure is not None:
            raise data.failure
        assert data.made is not None and data.staging is not None
        return data.made, data.staging

    def endpoint(self, link: LinkId, number: int, role: Role) -> None:
        """Begin a link on which we are ``role``; ``number`` tells it from earlier ones of that name."""
        self._inbox.post(self._data.endpoint, link, number, role)

    def connect(self, link: LinkId, number: int, mine: bytes, theirs: bytes) -> None:
        self._inbox.post(self._data.connect, link, number, mine, theirs)

    def disconnect(self, link: LinkId) -> None:
        self._inbox.post(self._data.disconnect, link)

    def move(self, action: Move) -> None:
        if not action.piece_bytes and self._data.made is not None and not self._data.made.factored:
            action.plan.runs()  # made here, so that the data thread, which serves all links, has nothing to do but move
        self._inbox.post(self._data.move, action)

    def abort(self, ref: PartRef) -> None:
        self._inbox.post(self._data.abort, ref)

    def remote_writes_ended(self, ref: PartRef) -> None:
        """Say that the peer has ended its half of this part for good."""
        self._inbox.post(self._data.remote_writes_ended, ref)

    def slot(self, ref: PartRef, piece: int, offset: int, nbytes: int) -> None:
        """Hand on a ``SlotReady`` or ``SlotFree`` message for this part (of ``SlotFree`` only ``piece`` counts)."""
        self._inbox.post(self._data.slot, ref, piece, offset, nbytes)

    def stop(self) -> None:
        """Have everything end."""
        self._inbox.post(self._data.stop)

    def close(self, timeout: float) -> None:
        """End everything and wait for the thread, ``timeout`` seconds at most (it is a daemon thread).

        Of each part that had not ended the end is posted, later if the back end did not let go in time.
        """
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.error("the back end did not close within %g s; its thread is abandoned", timeout)
                return
        self._inbox.close()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of parts that have ended but whose memory the back end may still touch."""
        return self._data.quarantined_bytes
