"""All movers of an agent: one for each back end that its links use, behind the face of one.

Most agents have a single back end. With several (``backend: auto``) each link is made with one of them; the first is
started at once, another when a link first asks for it. Used by the control thread, save where it is said otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvxfer.data.mover import Mover
from kvxfer.data.policy import LinkPolicy
from kvxfer.data.staging import Staging
from kvxfer.errors import ConfigError
from kvxfer.protocol.values import LinkId, Move, PartRef, Role
from kvxfer.transport import Capabilities

__all__ = ["DataPlane"]

log = logging.getLogger("kvxfer.movers")


class DataPlane:
    """All back ends of an agent, each with its data thread.

    Args:
        candidates: Names of the back ends, by preference.
        make: Builds the mover of one.
        terms: Tells how one that has been started is used.
    """

    def __init__(
        self,
        candidates: tuple[str, ...],
        make: Callable[[str], Mover],
        terms: Callable[[str, Capabilities, Staging], LinkPolicy],
    ) -> None:
        self.candidates = candidates
        self._make, self._terms_of = make, terms
        self._first = make(candidates[0])
        self._data = {candidates[0]: self._first}
        self._terms: dict[str, LinkPolicy] = {}
        self._of: dict[LinkId, Mover] = {}
        self._closing: dict[LinkId, int] = {}  # answers to ``disconnect`` that are still to come
        self._held: dict[LinkId, tuple[int, str, Role]] = {}  # asked for while the link was being closed

    def start(self, timeout: float) -> None:
        """Start the first back end that can be; those before it drop out of the candidates.

        Any thread may call it. If it raises, ``close``.

        Args:
            timeout: Seconds that each may take.

        Raises:
            ConfigError: Options do not fit.
            Exception: What kept the last candidate from starting.
        """
        while True:
            first, *others = self.candidates
            try:
                self._first.start(timeout)
                return
            except ConfigError:
                raise
            except Exception as e:
                if not others:
                    raise
                log.warning("back end %s cannot be started, %s takes its place: %s", first, others[0], e)
                self._data.pop(first).close(1.0)
                self.candidates = tuple(others)
                self._first = self._data[others[0]] = self._make(others[0])

    def terms(self, backend: str) -> LinkPolicy:
        """Return how a back end is used that has given an endpoint."""
        if backend not in self._terms:
            self._terms[backend] = self._terms_of(backend, *self._data[backend].made)
        return self._terms[backend]

    def endpoint(self, link: LinkId, number: int, backend: str, role: Role) -> None:
        """Begin a link on which we are ``role`` with this back end, once all that the link was before is closed."""
        if link in self._closing:
            self._held[link] = number, backend, role
            return
        if backend not in self._data:
            mover = self._make(backend)
            mover.begin()
            self._data[backend] = mover
        self._of[link] = self._data[backend]
        self._of[link].endpoint(link, number, role)

    def connect(self, link: LinkId, number: int, mine: bytes, theirs: bytes) -> None:
        self._mover(link).connect(link, number, mine, theirs)

    def disconnect(self, link: LinkId) -> None:
        self._held.pop(link, None)
        self._closing[link] = self._closing.get(link, 0) + 1
        mover = self._mover(link)
        self._of.pop(link, None)
        mover.disconnect(link)

    def disconnected(self, link: LinkId) -> bool:
        """Take in an answer to ``disconnect``.

        Returns:
            Whether it was the last, so that nothing comes over the link any more from any back end.
        """
        self._closing[link] -= 1
        if self._closing[link]:
            return False
        del self._closing[link]
        if link in self._held:
            self.endpoint(link, *self._held.pop(link))
        return True

    def move(self, action: Move) -> None:
        self._mover(action.ref.link).move(action)

    # A part may be of an earlier making of its link, with another back end; a mover ignores those that it does not know.

    def abort(self, ref: PartRef) -> None:
        for mover in self._data.values():
            mover.abort(ref)

    def remote_writes_ended(self, ref: PartRef) -> None:
        for mover in self._data.values():
            mover.remote_writes_ended(ref)

    def slot(self, ref: PartRef, piece: int, offset: int, nbytes: int) -> None:
        for mover in self._data.values():
            mover.slot(ref, piece, offset, nbytes)

    def close(self, timeout: float) -> None:
        """End all, within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        for mover in list(self._data.values()):
            mover.stop()
        for mover in list(self._data.values()):
            mover.close(max(until - time.monotonic(), 0.1))

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of parts that have ended but whose memory a back end may still touch. Any thread."""
        return sum(mover.quarantined_bytes for mover in list(self._data.values()))

    def _mover(self, link: LinkId) -> Mover:
        return self._of.get(link, self._first)  # a link that is closed has none, which any can say
