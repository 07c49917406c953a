"""How two processes of one host tell each other what nobody else may say for them: the address by which shared memory is reached.

A library that believes such an address attaches whatever process or memory it names. So it is told over the socket of a link
(``Liveness``) only, to and by a process that could reach as much by itself (``PeerProcess.equals_us``). Either side says yes, with its
address, or no; both must have said yes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from kvxfer.backend.liveness import Liveness
from kvxfer.backend.passed import MAX_BYTES, passed, taken
from kvxfer.errors import PeerError

__all__ = ["Introduction"]

_YES, _NO = b"Y", b"N"


class Introduction:
    """What this side tells over a link's socket, and what the peer has told.

    Attributes:
        willing: Whether this side has said yes.
        over: Whether nothing more need be waited for.
        address: What the peer has told, if both have said yes.
    """

    def __init__(self, liveness: Liveness, address: Callable[[], bytes] | None) -> None:
        """Tell the peer.

        Args:
            liveness: The link's socket, which is connected.
            address: Makes this side's address, if the peer may have it; ``None`` if there is none.

        Raises:
            OSError: No descriptor is left.
        """
        self.address: bytes | None = None
        self._liveness, self._heard = liveness, False
        mine = address() if address is not None and liveness.process.equals_us() else None
        self.willing = mine is not None and len(mine) <= MAX_BYTES
        file = None if mine is None or not self.willing else passed(mine, "kvxfer-introduction")
        try:
            with suppress(OSError):  # it is gone, as its socket will say
                liveness.tell(*((_NO,) if file is None else (_YES, file)))
        finally:
            if file is not None:
                os.close(file)

    @property
    def over(self) -> bool:
        return self._heard or not self.willing

    def hear(self) -> None:
        """Take in what the peer has said.

        Raises:
            PeerError: It makes no sense, or the peer is gone.
        """
        heard = self._liveness.heard
        while heard:
            message, descriptors = heard.popleft()
            try:
                if self._heard or (message, len(descriptors)) not in ((_YES, 1), (_NO, 0)):
                    raise PeerError(f"{self._liveness.peer} sent a message that makes no sense")
                self._heard = True
                if self.willing and descriptors:
                    self.address = taken(descriptors[0])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        if not self.over and self._liveness.down is not None:
            raise PeerError(self._liveness.down)
