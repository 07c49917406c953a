"""Peers and links. A peer is a NIXL agent that ours has a connection to; any number of links share it.

The connection stays when the last link goes: each new one that UCX makes costs both sides a socket until one of
the processes ends. A link is up once the other side has greeted us, and down once it has said goodbye or the
connection has failed. Greeting and goodbye are NIXL notifications that name the receiver's end of the link.

A peer of this host is sent nothing just to find out whether it is there: a socket tells that (``Liveness``). UCX notices no death
there. Once a peer that has died or stopped has been sent some 250 messages, more than its queue in shared memory takes, NIXL cannot
be closed (``rest.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from kvxfer import clock
from kvxfer.backend import Liveness
from kvxfer.backend.introduction import Introduction
from kvxfer.errors import KvxferError, PeerError, TransportError
from kvxfer_nixl.agent import LibraryAgent
from kvxfer_nixl.endpoint import Endpoint
from kvxfer_nixl.space import RegisteredSpace

GREETING, GOODBYE, NOTHING = "+", "-", "."
GREET_AGAIN_S = 0.25
"""A peer of another host that dies before it has greeted us is noticed by greeting it again."""


class Peer:
    """A peer of one of our agents.

    Attributes:
        name: NIXL's here, which it does not choose itself.
        here: Whether a socket tells of its end.
        agent: Ours, which knows it.
        error: Why the connection has failed; it never comes back.
        copies: Whether posting GPU memory may copy it, as far as is known, so that it has to be cut into pieces.
    """

    def __init__(self, name: str, here: bool, agent: LibraryAgent) -> None:
        self.name, self.here, self.agent, self.copies = name, here, agent, True
        self.error: TransportError | None = None

    def tell(self, message: str) -> None:
        """Send a message, at once.

        Raises:
            TransportError: The connection is known to have failed.
        """
        if self.error is None:
            try:
                self.agent.tell(self.name, message)
            except TransportError as e:
                self.error = e
        if self.error is not None:
            raise self.error


class Peers:
    """The peers of one agent."""

    def __init__(self, agent: LibraryAgent) -> None:
        self._agent = agent
        self._known: dict[bytes, Peer] = {}  # by their metadata

    def connect(self, metadata: bytes, here: bool) -> Peer:
        """Return the peer with these metadata: the one we know, or a new one, of whose end a socket tells if it is ``here``.

        Raises:
            TransportError: NIXL does not take them.
        """
        for known, peer in list(self._known.items()):
            if not peer.here:  # nobody says when an idle connection has failed; the next message does
                with suppress(TransportError):
                    peer.tell(NOTHING)
            if peer.error is not None:
                self._agent.remove(peer.name)
                del self._known[known]
        if metadata not in self._known:
            self._known[metadata] = Peer(self._agent.add(metadata), here, self._agent)
        return self._known[metadata]


class Link:
    """``end``: our end. ``liveness``: of a peer of this host, whose end NIXL may not tell of. ``broken``: why nothing can move any more."""

    def __init__(
        self,
        number: int,
        end: str,
        theirs: Endpoint,
        liveness: Liveness | None,
        introduction: Introduction | None,
        choose: Callable[[bytes | None], Peer],
    ) -> None:
        """Greet the peer, now or once it has said which of its agents serves it.

        Args:
            number: The link's.
            end: Our end of it.
            theirs: The peer's.
            liveness: Tells of the peer's end if it is on this host.
            introduction: What the two tell each other over that socket.
            choose: Makes the peer known to one of our agents, given what it has told there.

        Raises:
            TransportError: Its description or metadata make no sense.
        """
        self.number, self.end, self.their_end, self.agent = number, end, theirs.name, theirs.agent
        self.liveness, self._introduction, self._choose = liveness, introduction, choose
        self.space = RegisteredSpace.of_peer(theirs.memories)
        self.peer: Peer | None = None
        self._greeted = False
        self._broken: PeerError | None = None
        self.began = clock.now()
        self._again_s = GREET_AGAIN_S if liveness is None else math.inf
        self._greet_at = self.began + self._again_s
        self._settle()

    def __str__(self) -> str:
        return f"peer {self.agent!r} (link {self.number})"

    @property
    def broken(self) -> PeerError | None:
        if self._broken is None and self.liveness is not None:
            self.liveness.check()
            if self.liveness.down is not None:
                self._fail(f"the connection has failed: {self.liveness.down}")
        if self._broken is None and (self.peer is None or (self.liveness is not None and self.liveness.heard)):
            try:
                self._settle()
            except KvxferError as e:
                self._fail(f"it cannot be reached: {e}", e)
        if self._broken is None and self.peer is not None and self.peer.error is not None:
            self._fail(f"the connection has failed: {self.peer.error}", self.peer.error)
        return self._broken

    def _settle(self) -> None:
        """Take in what the peer says over its socket, and choose the agent for it once that is clear.

        Raises:
            TransportError: There is none, or it does not take the peer. So does ``PeerError``.
        """
        told = None
        if self._introduction is not None:
            self._introduction.hear()
            if not self._introduction.over:
                return
            told = self._introduction.address
        if self.peer is None:
            self.peer = self._choose(told)
            self._greet()  # even one that has greeted us before

    @property
    def up(self) -> bool:
        """Whether the other side is there; on this host it has to say so itself, no matter who greets in its name."""
        return self._greeted and self.peer is not None and (self.liveness is None or self.liveness.up)

    def greet(self, now: float) -> None:
        """Tell the peer again that this end is there, if it is time to: where no socket tells of the peer's end."""
        if not self._greeted and self.broken is None and self.peer is not None and now >= self._greet_at:
            self._greet_at = now + self._again_s
            self._greet()

    def _greet(self) -> None:
        """Tell the peer that this end is there. The first time also makes the connection, so that no transfer has to wait for it."""
        assert self.peer is not None  # it was chosen
        with suppress(TransportError):  # it is in ``broken`` now
            self.peer.tell(GREETING + self.their_end)

    def hear(self, message: str) -> None:
        if message == GREETING:
            self._greeted = True
        elif message == GOODBYE:
            self._fail("the peer has closed the link")

    def close(self, why: str) -> None:
        """No more batches; the peer is told."""
        if self.broken is None:
            if self.peer is not None:
                with suppress(TransportError):  # then there is nobody to tell
                    self.peer.tell(GOODBYE + self.their_end)
            self._fail(why)

    def _fail(self, what: str, cause: Exception | None = None) -> None:
        self._broken = PeerError(what)
        self._broken.__cause__ = cause
