"""All data threads of an agent: one for each back end that its links use, to be used as if they were one.

Most agents have a single back end. With several (``backend: auto``) each link is made with one of them; the first is
started at once, another when a link first asks for it. Used by the control thread, save where it is said otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import assert_never

from kvxfer.data.commands import Command, Connect, Disconnect, MakeEndpoint, PieceReady, PieceTaken, Stop
from kvxfer.data.data_thread import DataThread
from kvxfer.data.policy import LinkPolicy
from kvxfer.data.staging import Staging
from kvxfer.errors import ConfigError
from kvxfer.protocol.values import Abort, LinkId, Move, RemoteWritesEnded
from kvxfer.transport import Capabilities

__all__ = ["DataPlane"]

log = logging.getLogger("kvxfer.data")


class DataPlane:
    """All back ends of an agent, by preference, each with its data thread; ``policy`` tells how one that has been started is used."""

    def __init__(
        self,
        candidates: tuple[str, ...],
        make: Callable[[str], DataThread],
        policy: Callable[[str, Capabilities, Staging], LinkPolicy],
    ) -> None:
        self.candidates = candidates
        self._make, self._policy_of = make, policy
        self._first = make(candidates[0])
        self._threads = {candidates[0]: self._first}
        self._policies: dict[str, LinkPolicy] = {}
        self._of: dict[LinkId, DataThread] = {}
        self._closing: dict[LinkId, int] = {}  # answers to ``Disconnect`` that are still to come
        self._held: dict[LinkId, MakeEndpoint] = {}  # asked for while the link was being closed

    def start(self, timeout: float) -> None:
        """Start the first back end that can be within so many seconds; those before it drop out of the candidates.

        Any thread may call it. If it raises, ``close``.

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
                self._threads.pop(first).close(1.0)
                self.candidates = tuple(others)
                self._first = self._threads[others[0]] = self._make(others[0])

    def policy(self, backend: str) -> LinkPolicy:
        """Return how links use a back end, which has given an endpoint and so is started."""
        if backend not in self._policies:
            self._policies[backend] = self._policy_of(backend, *self._threads[backend].made)
        return self._policies[backend]

    def post(self, command: Command) -> None:
        """Have something done by the back end that it concerns; results come as they do from each."""
        match command:
            case Move():
                self._of_link(command.ref.link).post(command)
            case MakeEndpoint():
                self._endpoint(command)
            case Connect():
                self._of_link(command.link).post(command)
            case Disconnect():
                self._disconnect(command)
            case Abort() | RemoteWritesEnded() | PieceReady() | PieceTaken() | Stop():
                # A part may be of an earlier link by another back end; a thread that does not know the part ignores it.
                for data in list(self._threads.values()):
                    data.post(command)
            case _:
                assert_never(command)

    def _endpoint(self, asked: MakeEndpoint) -> None:
        """Begin a link, once what there was of it before has been closed."""
        link, backend = asked.link, asked.backend
        if link in self._closing:
            self._held[link] = asked
            return
        if backend not in self._threads:
            data = self._make(backend)
            data.begin()
            self._threads[backend] = data
        self._of[link] = self._threads[backend]
        self._of[link].post(asked)

    def _disconnect(self, command: Disconnect) -> None:
        link = command.link
        self._held.pop(link, None)
        self._closing[link] = self._closing.get(link, 0) + 1
        data = self._of_link(link)
        self._of.pop(link, None)
        data.post(command)

    def disconnected(self, link: LinkId) -> bool:
        """Take in an answer to ``Disconnect``; return whether it was the last: nothing comes over the link any more from any back end."""
        self._closing[link] -= 1
        if self._closing[link]:
            return False
        del self._closing[link]
        if link in self._held:
            self._endpoint(self._held.pop(link))
        return True

    def close(self, timeout: float) -> None:
        """End all, within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        self.post(Stop())
        for data in list(self._threads.values()):
            data.close(max(until - time.monotonic(), 0.1))

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of parts that have ended but whose memory a back end may still touch. Any thread."""
        return sum(data.quarantined_bytes for data in list(self._threads.values()))

    def _of_link(self, link: LinkId) -> DataThread:
        return self._of.get(link, self._first)  # a closed link has none, and any thread can say so
