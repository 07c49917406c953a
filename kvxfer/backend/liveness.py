"""Tells each end of a link between processes of one host whether the other end is alive.

Memory that another process shares stays readable after that process has closed the link or died, so a socket has to
show it. Each end, when it connects, opens a Unix socket to the other end's listener and says which link it means. An end is up
once both ends have done so, and down as soon as either socket closes, which the kernel sees to when a process dies.

The kernel also says which process an end belongs to (``Liveness.process``). What that process tells of itself over these sockets
is therefore its own word, no matter who has carried the two endpoints from one end to the other.

Each end also says which control connection the link belongs to (``Transport.connect_over``). If it is not the same for both, somebody
has carried the endpoints of two others to each other, and both ends are down before either has told anything.

Most ends stay silent after that. A back end can send messages, and descriptors of memory, by ``tell``.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from kvxfer.backend.door import Elsewhere, UnixDoor, knock
from kvxfer.backend.process import PeerProcess
from kvxfer.backend.wakeup import Wakeup
from kvxfer.errors import TransportError

__all__ = ["BINDING_BYTES", "LINK_BYTES", "Liveness", "LivenessLinks"]

LINK_BYTES = 16
"""Length of the name of a link's end, which is random and known only to the peer."""

BINDING_BYTES = 16
"""Length of what names a control connection to both its ends."""

_GREETING = 2 * LINK_BYTES + BINDING_BYTES

MESSAGE_BYTES, MAX_HEARD = 256, 64
"""The most bytes of a message, and the most unread messages; an end that gets more goes down."""


class Liveness:
    """One end of a link.

    Attributes:
        up: Whether the peer has connected too.
        down: Why the link cannot be used any more, or ``None``.
        process: The process that the peer's end belongs to, and from which all messages come.
        heard: Messages of the peer, the oldest first, each with the descriptors that came with it, which the reader must close.
    """

    def __init__(self, mine: bytes, theirs: bytes, peer: str, process: PeerProcess, control: bytes) -> None:
        self.mine, self.theirs, self.peer, self.process, self.control = mine, theirs, peer, process, control
        self.up = False
        self.down: str | None = None
        self.heard: deque[tuple[bytes, list[int]]] = deque()
        self._sockets: list[socket.socket] = []  # the one that was dialled, by which we speak, is the first

    def check(self) -> None:
        """Read what the peer has sent, and find out whether it is still there, without waiting."""
        if self.down is None and [s for s in self._sockets if not self._listens(s)]:
            self.down = f"{self.peer} is gone, or has closed this link; connect again"

    def tell(self, message: bytes, *descriptors: int) -> None:
        """Send the peer at most ``MESSAGE_BYTES``, with descriptors that the caller must still close. It need not be up yet.

        Raises:
            OSError: The peer is gone, or has not read hundreds of messages.
        """
        if self.down is not None:
            raise OSError(self.down)
        socket.send_fds(self._sockets[0], [message], descriptors)

    def _listens(self, held: socket.socket) -> bool:
        """Read what has come; return whether the other end is still open."""
        try:
            while len(self.heard) < MAX_HEARD:
                message, descriptors, _, _ = socket.recv_fds(held, MESSAGE_BYTES, 4)
                if not message:
                    return False
                self.heard.append((message, descriptors))
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class LivenessLinks:
    """The ends of all links of a transport.

    Attributes:
        name: Where peers announce themselves.
    """

    def __init__(self, backend: str, wakeup: Wakeup) -> None:
        """Listen; ``wakeup`` wakes from then on when ``handle`` has something to do."""
        self._door = UnixDoor(backend, wakeup)
        self.name = self._door.name
        self._wakeup = wakeup
        self._offered: dict[bytes, Liveness | None] = {}
        self._early: dict[
            bytes, tuple[bytes, bytes, socket.socket]
        ] = {}  # by our link: what was there before we connected

    def offer(self, link: bytes) -> None:
        self._offered[link] = None

    def unused(self, link: bytes) -> bool:
        """Return whether this end was offered and has not been connected."""
        return self._offered.get(link, self) is None

    def withdraw(self, link: bytes) -> None:
        """Take back what was offered, unless it has been connected."""
        if self.unused(link):
            del self._offered[link]
            if link in self._early:
                self._early.pop(link)[-1].close()

    def connect(self, mine: bytes, theirs: bytes, name: str, peer: str, control: bytes | None = b"") -> Liveness:
        """Connect end ``mine`` to the peer's end ``theirs``, whose listener is ``name``; return this end.

        ``control`` is what the back end was given for the link (``Base.control``).

        Raises:
            Elsewhere: The peer is not on this host and in this network namespace, or nothing shows that it is; nothing has changed.
            TransportError: ``name`` is none that a peer can have, or the peer has said that its link belongs to another control
                connection; nothing has changed.
            OSError: No descriptor is left, or the peer accepts nobody; nothing has changed.
        """
        if name == self.name:
            raise TransportError(
                f"{peer} is this process itself, to which this back end makes no link",
                advice="have the router send such requests elsewhere, or set `backend` to `auto`",
            )
        if control is None:
            raise Elsewhere(f"{peer} runs on another host: its control connection comes from there, without a key")
        control = control.ljust(BINDING_BYTES, b"\0")[:BINDING_BYTES]
        dialled = knock(name, peer)
        try:
            end = Liveness(mine, theirs, peer, PeerProcess(dialled), control)
            with suppress(ConnectionError):  # it has ended just now, and its socket will say so
                dialled.send(theirs + mine + control)
        except BaseException:
            dialled.close()
            raise
        self._offered[mine] = end
        self._attach(end, dialled)
        if mine in self._early:
            self._announced(end, *self._early.pop(mine))
            if end.down is not None:
                self.hang_up(end)
                self.offer(mine)
                raise TransportError(end.down)
        return end

    @contextmanager
    def connected(
        self, mine: bytes, theirs: bytes, name: str, peer: str, control: bytes | None = b""
    ) -> Iterator[Liveness]:
        """Do as ``connect`` does, for a ``with`` block that makes the link; if the block fails, end ``mine`` is as unused as before."""
        end = self.connect(mine, theirs, name, peer, control)
        try:
            yield end
        except BaseException:
            self.hang_up(end)
            self.offer(mine)
            raise

    @contextmanager
    def connected_if_here(
        self, mine: bytes, theirs: bytes, name: str, peer: str, control: bytes | None = b""
    ) -> Iterator[Liveness | None]:
        """Do as ``connected`` does; ``None`` if the peer is not on this host and in this network namespace."""
        with ExitStack() as undo:
            try:
                end = undo.enter_context(self.connected(mine, theirs, name, peer, control))
            except Elsewhere:
                end = None
            yield end

    def hang_up(self, end: Liveness) -> None:
        """Tell the peer that the link is closed. Idempotent."""
        self._offered.pop(end.mine, None)
        end.down = end.down or f"the link to {end.peer} was closed on this side"
        self._detach(end)

    def handle(self, readable: Iterable[object]) -> list[Liveness]:
        """Handle the sockets that ``wakeup`` named: new connections, and messages or ends of others.

        Returns:
            The ends that these have heard something of; some may be ``down``.
        """
        heard = []
        for source in readable:
            stranger = self._door.answer(source)
            if stranger is not None:
                end = self._hear(stranger)
            elif isinstance(source, Liveness):
                source.check()
                end = source
            else:
                continue
            if end is not None:
                heard.append(end)
                if end.down is not None:
                    self._detach(end)
        return heard

    def close(self) -> None:
        for end in list(self._offered.values()):
            if end is not None:
                self.hang_up(end)
        for *_, early in self._early.values():
            early.close()
        self._door.close()

    def _hear(self, stranger: socket.socket) -> Liveness | None:
        try:
            said = stranger.recv(_GREETING + 1)
        except OSError:
            said = b""
        mine, theirs, control = said[:LINK_BYTES], said[LINK_BYTES : 2 * LINK_BYTES], said[2 * LINK_BYTES :]
        if len(said) != _GREETING or mine not in self._offered or mine in self._early:
            stranger.close()  # no link of ours; it sees the socket close
            return None
        end = self._offered[mine]
        if end is None:
            self._early[mine] = theirs, control, stranger
        else:
            self._announced(end, theirs, control, stranger)
        return end

    def _announced(self, end: Liveness, theirs: bytes, control: bytes, heard: socket.socket) -> None:
        if theirs != end.theirs or end.up or end.down is not None or not _comes_from(heard, end.process):
            heard.close()
            return
        if control != end.control:
            heard.close()
            end.down = (
                f"{end.peer} does not belong to this link's control connection: who is at its other end has passed on the endpoint "
                "of another process"
            )
            return
        self._attach(end, heard)
        end.up = True

    def _attach(self, end: Liveness, held: socket.socket) -> None:
        end._sockets.append(held)
        self._wakeup.add(held.fileno(), end)

    def _detach(self, end: Liveness) -> None:
        for held in end._sockets:
            self._wakeup.remove(held.fileno())
            held.close()
        end._sockets.clear()
        end.process.close()
        for _, descriptors in end.heard:
            for descriptor in descriptors:
                os.close(descriptor)
        end.heard.clear()


def _comes_from(heard: socket.socket, process: PeerProcess) -> bool:
    """Return whether the process that connected this socket is the one that was connected to."""
    try:
        speaker = PeerProcess(heard)
    except OSError:  # no descriptor is left
        return False
    try:
        return speaker.is_also(process)
    finally:
        speaker.close()
