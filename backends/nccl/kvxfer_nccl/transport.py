"""``NcclTransport``: links by number, the listener that their connections come in by, driven by ``poll``."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.errors import KvxferError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.transport import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup
from kvxfer_nccl.binding import Binding
from kvxfer_nccl.channel import Channel, listen
from kvxfer_nccl.lane import Post
from kvxfer_nccl.link import Link
from kvxfer_nccl.options import Options
from kvxfer_nccl.wire import Bye, Endpoint, Hello, new_token

__all__ = ["NcclTransport"]

GREET_S = 5.0
"""How long a connection may take to say what it is for."""

STRANGERS = 256
"""Connections that may be in that state."""

_log = logging.getLogger("kvxfer.nccl")


class NcclTransport(Transport):
    """SEND and RECV of CUDA memory between GPUs, each link and direction over a communicator of its own.

    ``Options`` says what ``options`` may hold. Only the thread that made it may use it.
    """

    name = "nccl"
    contract = 1
    inherits = frozenset({"listen", "advertise"})

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self._options = Options.parse(options)
        self._binding = self.load()
        self._thread = threading.current_thread()
        self._memories = Memories()
        self._device: str | None = None
        self._sealed = self._closed = False
        self._numbers = 0
        self._offers: dict[bytes, Endpoint] = {}
        self._links: dict[int, Link] = {}
        self._ending: dict[int, Link] = {}  # disconnected, not yet over
        self._due: dict[int, float] = {}
        self._strangers: dict[int, tuple[Channel, float]] = {}
        self._early: dict[bytes, tuple[Channel, Hello]] = {}
        self._ended: list[Completion] = []
        self._woken: deque[int] = deque()
        self._waking = threading.Lock()
        try:
            self._listener = listen(self._options.listen, self._options.port)
        except OSError as e:
            where = f"{self._options.listen} port {self._options.port}"
            raise TransportError(f"back end 'nccl' of {agent!r} cannot listen on {where}: {e}") from e
        self._wakeup = Wakeup()
        self._wakeup.add(self._listener.fileno(), "listener")

    @classmethod
    def load(cls) -> Binding:
        """What makes communicators. Raises ``TransportError`` when it is missing or cannot start."""
        from kvxfer_nccl.nccl import load

        return load()

    @classmethod
    def probe(cls) -> Probe:
        try:
            binding = cls.load()
        except KvxferError as e:
            return Probe(False, str(e))
        reason = f"NCCL {binding.release} between GPUs, one of its own for each process"
        return Probe(True, reason, binding.memory, dict(binding.versions))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            verbs=frozenset({Verb.SEND, Verb.RECV}),
            memory=self._binding.memory,
            gathers=False,
            run_bytes=1 << 20,
            abort="peer",
            quiet="backend_reset",
        )

    def register(self, regions: Sequence[Region]) -> int:
        self._check()
        if self._sealed:
            raise TransportError("all memory must be registered before the first endpoint is made")
        devices = {r.device for r in regions} | ({self._device} if self._device else set())
        if len(devices) > 1:
            raise TransportError(f"back end 'nccl' drives one GPU a process; this memory lies on {sorted(devices)}")
        number = self._memories.add(regions, self._binding.memory)
        self._device = next(iter(devices), None)
        return number

    def deregister(self, memory: int) -> None:
        self._check()
        for link in [*self._links.values(), *self._ending.values()]:
            if any(p.memory == memory for p in link.posts()):
                raise TransportError(f"memory {memory} is in use by a batch with {link.theirs}; abort that first")
        self._memories.remove(memory)

    def endpoint(self) -> bytes:
        self._check()
        self._sealed = True
        if self._device is None:
            self._device = self._binding.default_device()
        mine = Endpoint(
            self.agent,
            self._options.host,
            self._listener.getsockname()[1],
            new_token(),
            self._binding.identity(self._device),
            self._options.channels,
            self._binding.release,
        )
        self._offers[mine.token] = mine
        return mine.encode()

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check()
        own, their = Endpoint.decode(mine), Endpoint.decode(theirs)
        if self._offers.get(own.token) != own:
            raise TransportError("the first argument of connect is no unused endpoint of this transport")
        if own.token == their.token:
            raise TransportError("both endpoints are the same; connect takes one of each side")
        if own.device == their.device:
            raise TransportError(
                f"{their} uses the same GPU ({own.device}), and NCCL refuses two ranks on one; use back end 'cuda_ipc'"
            )
        if own.release != their.release:
            raise TransportError(
                f"{their} has NCCL {their.release}, this side {own.release}: they do not understand each other; "
                "install the same release on both"
            )
        del self._offers[own.token]
        number = self._number()
        assert self._device is not None  # known since the endpoint was made
        self._links[number] = link = Link(
            number,
            own,
            their,
            self._binding,
            self._options,
            self._device,
            self._wakeup,
            lambda: self._wake(number),
            self._ended.append,
        )
        early = self._early.pop(own.token, None)
        if early is not None:
            self._introduce(link, *early)
        self._wake(number)
        return number

    def withdraw(self, endpoint: bytes) -> None:
        self._check()
        token = Endpoint.decode(endpoint).token
        if self._offers.pop(token, None) is not None and token in self._early:
            channel, _ = self._early.pop(token)
            channel.say(Bye("the other side has given this link up"))
            channel.close()

    def disconnect(self, peer: int) -> None:
        self._check()
        link = self._links.pop(peer, None)
        if link is not None:
            link.end(TransportError("the link was closed on this side"), "the other side closed the link")
            self._ending[peer] = link

    def lost(self, peer: int) -> str | None:
        link = self._links.get(peer)
        return None if link is None or link.cause is None else str(link.cause)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._check()
        link = self._links.get(batch.peer)
        if link is None:
            raise TransportError(f"there is no link {batch.peer}; it was never made or is closed")
        if batch.verb not in (Verb.SEND, Verb.RECV) or not isinstance(batch, Batch):
            raise TransportError("back end 'nccl' takes SEND and RECV of runs, nothing else")
        if not link.lane(batch.verb).takes(batch.stream):
            raise TransportError(f"stream {batch.stream} comes too late on link {batch.peer}: their numbers must rise")
        runs = self._memories.runs(batch.local, batch.local_offsets, batch.lengths)
        number = self._number()
        link.post(Post(number, batch.verb, batch.local, batch.stream, runs, sum(n for _, n in runs), after))
        self._step(batch.peer, time.monotonic())  # at once: whoever submits several must not delay the first
        self._arm()
        return number

    def poll(self) -> list[Completion]:
        self._check()
        now = time.monotonic()
        fired = self._wakeup.clear()
        hot = {key for key in fired if isinstance(key, int)}
        while self._woken:
            hot.add(self._woken.popleft())
        hot.update(number for number, due in self._due.items() if due <= now)
        if "listener" in fired:
            self._take_in(now)
        self._greet(now)
        for number in hot:
            self._step(number, now)
        ended = self._ended.copy()
        self._ended.clear()  # the links hold on to this very list
        self._arm()
        return ended

    def abort(self, batch: int) -> None:
        self._check()
        for number, link in self._links.items():
            if link.has(batch):
                why = f"batch {batch} was aborted on this side, which ends the link: NCCL aborts whole communicators"
                link.end(TransportError(why), "the other side aborted a batch, which ends all of the link")
                self._wake(number)
                return

    def close(self) -> None:
        if self._closed:
            return
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            raise TransportError(f"the transport of {self.agent!r} belongs to another thread, which is still alive")
        links = [*self._links.values(), *self._ending.values()]
        for link in links:
            link.end(TransportError("the transport was closed on this side"), "the other side shut down")
        with self._waking:
            self._closed = True
        until = time.monotonic() + self._options.abort_timeout_s
        left = [link for link in links if not link.wait(until)]
        if left:
            _log.error(
                "%s: NCCL did not end its communicators with %s within %g s; their memory may still be touched, and "
                "nothing but the end of this process can change that",
                self.agent,
                ", ".join(str(link.theirs) for link in left),
                self._options.abort_timeout_s,
            )
        for channel in [*(c for c, _ in self._strangers.values()), *(c for c, _ in self._early.values())]:
            channel.close()
        self._links.clear()
        self._ending.clear()
        self._wakeup.close()
        self._listener.close()

    def fileno(self) -> int | None:
        return self._wakeup.fileno()

    def _arm(self) -> None:
        """Have ``poll`` called when the next thing is due, and at once if a batch has ended outside of it."""
        self._wakeup.at(min([*self._due.values(), *(due for _, due in self._strangers.values())], default=None))
        if self._ended:
            self._wakeup.set()

    # Links

    def _step(self, number: int, now: float) -> None:
        link = self._links.get(number) or self._ending.get(number)
        if link is None:
            self._due.pop(number, None)
            self._greeted(number, now)
            return
        due = link.step(now)
        if due is None:
            self._due.pop(number, None)
        else:
            self._due[number] = due
        if number in self._ending and link.over:
            del self._ending[number]
            self._due.pop(number, None)

    def _wake(self, number: int) -> None:
        """Step a link in the next ``poll``, and have that called soon. From any thread, even after ``close``."""
        with self._waking:
            if not self._closed:
                self._woken.append(number)
                self._wakeup.set()

    # Connections that have not said yet which link they belong to

    def _take_in(self, now: float) -> None:
        while len(self._strangers) < STRANGERS:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:  # the one that came is gone already, or there are no descriptors left
                _log.warning("%s: a connection could not be taken: %s", self.agent, e)
                return
            number = self._number()
            channel = Channel(sock)
            self._strangers[number] = channel, now + GREET_S
            self._wakeup.add(channel.fileno(), number)
            self._woken.append(number)

    def _greet(self, now: float) -> None:
        for number, (channel, due) in list(self._strangers.items()):
            if due <= now:
                self._dismiss(number)
                channel.close()

    def _dismiss(self, number: int) -> Channel:
        channel, _ = self._strangers.pop(number)
        self._wakeup.remove(channel.fileno())
        return channel

    def _greeted(self, number: int, now: float) -> None:
        """See what a stranger has said."""
        if number not in self._strangers:
            return
        channel = self._strangers[number][0]
        try:
            words = channel.hear(1)
        except ValueError:
            self._dismiss(number).close()
            return
        if not words:
            if channel.lost is not None:
                self._dismiss(number).close()
            return
        self._dismiss(number)
        hello = words[0]
        if not isinstance(hello, Hello):
            channel.close()
        elif hello.yours in self._offers and hello.yours not in self._early:
            self._early[hello.yours] = channel, hello  # until connect is called here too
        else:
            link = next((k for k in self._links.values() if k.mine.token == hello.yours), None)
            if link is None:
                channel.say(Bye("the other side does not know this link (it closed it, or was restarted)"))
                channel.close()
            else:
                self._introduce(link, channel, hello)

    def _introduce(self, link: Link, channel: Channel, hello: Hello) -> None:
        if link.theirs.token != hello.mine:
            channel.close()
            return
        link.accept(channel)
        for number, known in self._links.items():
            if known is link:
                self._wake(number)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _check(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.agent!r} is closed")
        if threading.current_thread() is not self._thread:
            raise TransportError(f"the transport of {self.agent!r} belongs to the thread that made it")
