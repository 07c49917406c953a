"""All data threads of an agent, one for each back end that its links use, behind one interface.

Most agents have a single back end. With several (``backend: auto``) each link is made with one of them; the first is
started at once, another when a link first asks for it. Used by the control thread, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kvxfer import clock
from kvxfer.data.commands import Command, Connect, Disconnect, MakeEndpoint, SlotNews, Stop
from kvxfer.data.data_thread import HANGS_S, DataThread
from kvxfer.data.policy import LinkPolicy
from kvxfer.data.staging import Staging
from kvxfer.errors import ConfigError
from kvxfer.logs import logger
from kvxfer.protocol.values import Abort, HeldUp, LinkId, Move, RemoteWritesEnded
from kvxfer.security import RateLimitedWarnings
from kvxfer.transport import Capabilities

log = logger("kvxfer.data")


class DataPlane:
    """All back ends of an agent, by preference, each with its data thread; ``policy`` makes the policy of one that has started."""

    def __init__(
        self,
        candidates: tuple[str, ...],
        make: Callable[[str], DataThread],
        policy: Callable[[str, Capabilities, Staging], LinkPolicy],
    ) -> None:
        self.candidates = candidates
        self._complain = RateLimitedWarnings(log, 10.0)
        self._make, self._policy_of = make, policy
        self._first = make(candidates[0])
        self._threads = {candidates[0]: self._first}
        self._policies: dict[str, LinkPolicy] = {}
        self._of: dict[LinkId, DataThread] = {}
        self._closing: dict[LinkId, int] = {}  # answers to ``Disconnect`` that are still to come
        self._held: dict[LinkId, MakeEndpoint] = {}  # asked for while the link was being closed

    def start(self, timeout: float) -> None:
        """Start the first back end that starts within ``timeout`` seconds; those before it drop out of the candidates.

        Any thread may call it. If it raises, call ``close``.

        Raises:
            ConfigError: The options are wrong.
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
        """Return how links use a back end, which must have started."""
        if backend not in self._policies:
            self._policies[backend] = self._policy_of(backend, *self._threads[backend].made)
        return self._policies[backend]

    def post(self, command: Command) -> None:
        """Queue a command for the back end that it concerns."""
        match command:
            case Move():
                self._of_link(command.ref.link).post(command)
            case MakeEndpoint():
                self._endpoint(command)
            case Connect():
                self._of_link(command.link).post(command)
            case Disconnect():
                self._disconnect(command)
            case Abort() | RemoteWritesEnded() | SlotNews() | Stop():
                # The part may belong to an earlier link by another back end; a thread that does not know it ignores it.
                for data in list(self._threads.values()):
                    data.post(command)
            case _:
                assert_never(command)

    def _endpoint(self, asked: MakeEndpoint) -> None:
        """Begin a link, once its earlier connections have been closed."""
        link, backend = asked.link, asked.backend
        if link in self._closing:
            self._held[link] = asked
            return
        if backend not in self._threads:
            data = self._make(backend)
            try:
                data.begin()
            except RuntimeError as e:  # as where the limit of threads is reached; the next link tries again
                data.cannot_begin(asked, e)
                return
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
        """Record an answer to ``Disconnect``; return whether nothing comes over the link any more, by any back end."""
        self._closing[link] -= 1
        if self._closing[link]:
            return False
        del self._closing[link]
        if link in self._held:
            self._endpoint(self._held.pop(link))
        return not any(data.exposes(link) for data in list(self._threads.values()))

    def close(self, timeout: float) -> None:
        """End all data threads, within ``timeout`` seconds."""
        until = clock.now() + timeout
        self.post(Stop())
        for data in list(self._threads.values()):
            data.close(max(until - clock.now(), 0.1))

    def hangs(self) -> HeldUp | None:
        """Return ``HeldUp.CALL`` if a data thread does not come back from a call, and say so in the log; else ``None``. Any thread."""
        hanging = [name for name, data in list(self._threads.items()) if data.hangs]
        for name in hanging:
            self._complain(
                "back end %s, or the device of its memory, has not come back from a call for %g s", name, HANGS_S
            )
        return HeldUp.CALL if hanging else None

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of parts that have ended but whose memory a back end may still touch. Any thread."""
        return sum(data.quarantined_bytes for data in list(self._threads.values()))

    def _of_link(self, link: LinkId) -> DataThread:
        return self._of.get(link, self._first)  # a closed link has none, and any data thread can answer that
