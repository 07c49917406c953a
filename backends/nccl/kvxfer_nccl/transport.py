"""``NcclTransport``: links by number, the listener that their connections come in by, driven by ``poll``."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kvxfer import clock
from kvxfer.backend import Base
from kvxfer.backend.door import accept, listen
from kvxfer.backend.endpoint import new_token
from kvxfer.errors import KvxferError, TransportError
from kvxfer.geometry.region import Region
from kvxfer.transport import Batch, Capabilities, Fence, Probe, Verb
from kvxfer_nccl.binding import Binding
from kvxfer_nccl.channel import Channel
from kvxfer_nccl.direction import Post
from kvxfer_nccl.endpoint import Endpoint
from kvxfer_nccl.link import Link
from kvxfer_nccl.options import Options
from kvxfer_nccl.wire import Bye, Greeting

GREET_S = 5.0
"""How long a connection may take to say what it is for."""

STRANGERS = 256
"""Connections that may be in that state; of more, the oldest is closed."""

LEAVE_S = 0.001
"""How often a thread that waits for the goodbyes of links looks at them."""

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : .* via (\S+)")  # a line of NCCL's log


class NcclTransport(Base[Endpoint, Link]):
    """SEND and RECV of CUDA memory between GPUs, each link and direction over a communicator of its own.

    ``Options`` says what ``options`` may hold.
    """

    name = "nccl"
    contract = 2
    inherits = frozenset({"listen", "advertise"})
    opens_later = (
        "any free ones, opened by NCCL at the interfaces of NCCL_SOCKET_IFNAME, else at the first that it finds"
    )
    costs = {"cuda": 40}
    libraries = {"nccl": ("nccl4py", "nvidia-nccl-cu13", "nvidia-nccl-cu12")}
    tells = {"NCCL_DEBUG": "INFO"}
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        self._binding = self.load()
        self._capabilities = Capabilities(
            verbs=frozenset({Verb.SEND, Verb.RECV}),
            memory=self._binding.memory,
            gathers=False,
            run_bytes=1 << 20,
            abort="peer",
            quiet="later",
        )
        try:
            self._listener = listen(self._options.listen, self._options.port)
        except OSError as e:
            where = f"{self._options.listen} port {self._options.port}"
            raise TransportError(f"back end 'nccl' of {agent!r} cannot listen on {where}: {e}") from e
        super().__init__(agent, options)
        self._device: str | None = None
        self._offered: set[bytes] = set()  # tokens of endpoints that are not used yet
        self._ending: dict[int, Link] = {}  # disconnected, not yet over
        self._due: dict[int, float] = {}
        self._strangers: dict[int, tuple[Channel, float]] = {}
        self._early: dict[bytes, tuple[Channel, Greeting]] = {}
        self._woken: deque[int] = deque()
        self._waking = threading.Lock()
        self.wakeup.add(self._listener.fileno(), "listener")

    @classmethod
    def carried_by(cls, log: str) -> str | None:
        return ", ".join(dict.fromkeys(_CHANNEL.findall(log))) or None

    @classmethod
    def load(cls) -> Binding:
        """Return what makes communicators.

        Raises:
            TransportError: it is missing or cannot start.
        """
        from kvxfer_nccl.library import load

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
        return self._capabilities

    def add_memory(self, memory: int, regions: Sequence[Region]) -> None:
        devices = {r.device for r in regions} | ({self._device} if self._device else set())
        if len(devices) > 1:
            raise TransportError(
                f"back end 'nccl' drives one GPU for each process; this memory lies on {sorted(devices)}"
            )
        self._device = next(iter(devices), None)

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
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
        self._offered.add(mine.token)
        return mine

    def drop_endpoint(self, mine: Endpoint) -> None:
        self._offered.remove(mine.token)
        if mine.token in self._early:
            channel, _ = self._early.pop(mine.token)
            channel.say(Bye("the other side has given this link up"))
            channel.close()

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        if mine.device == theirs.device:
            raise TransportError(
                f"{theirs} uses the same GPU ({mine.device}), and NCCL refuses two ranks on one",
                advice="use back end 'cuda_ipc'",
            )
        if mine.release != theirs.release:
            raise TransportError(
                f"{theirs} has NCCL {theirs.release}, this side {mine.release}: they do not understand each other",
                advice="install the same release on both",
            )
        assert self._device is not None  # known since the endpoint was made
        link = Link(
            number,
            mine,
            theirs,
            self._binding,
            self._options,
            self._device,
            self.wakeup,
            lambda: self._wake(number),
            self.complete,
            self.quieted,
        )
        self._offered.remove(mine.token)
        early = self._early.pop(mine.token, None)
        if early is not None:
            self._introduce(link, *early)
        self._wake(number)
        return link

    def drop_link(self, number: int, link: Link) -> None:
        link.cut(TransportError("the link was closed on this side"), "the other side closed the link")
        self._ending[number] = link
        self._wake(number)  # it may have ended before, and be over

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        runs = self.memories.runs(batch.local, batch.local_offsets, batch.lengths)
        link.submit(Post(number, after, batch.verb, batch.stream, runs, sum(n for _, n in runs)))
        self._step(batch.peer, clock.now())  # at once: a caller that submits several must not delay the first
        self._arm()

    def stop(self, number: int, link: Link) -> None:
        why = f"batch {number} was aborted on this side, which ends the link: NCCL aborts whole communicators"
        link.cut(TransportError(why), "the other side aborted a batch, which ends all of the link")
        self._wake(link.number)

    def batch_moved(self, number: int, link: Link) -> int:
        post = link.flights[number]
        return link.direction(post.verb).bytes_moved(post)

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        now = clock.now()
        hot = {key for key in readable if isinstance(key, int)}
        while self._woken:
            hot.add(self._woken.popleft())
        hot.update(number for number, due in self._due.items() if due <= now)
        if "listener" in readable:
            self._take_in(now)
        self._greet(now)
        for number in hot:
            self._step(number, now)
        self._arm()

    def shut_down(self) -> None:
        with self._waking:
            pass  # a thread that is about to wake us has done so, and none does from now on
        links = [*self.links.values(), *self._ending.values()]
        for link in links:
            link.cut(TransportError("the transport was closed on this side"), "the other side shut down")
        # A peer with which a communicator is being made may say nothing more. That must leave time for the aborts.
        now, most = clock.now(), self._options.abort_timeout_s
        leaving, until = links, now + most
        while leaving := [link for link in leaving if not link.left(now + most / 2)]:
            clock.wait(LEAVE_S)
        left = [link for link in links if not link.wait(until)]
        for channel in [*(c for c, _ in self._strangers.values()), *(c for c, _ in self._early.values())]:
            channel.close()
        self._ending.clear()
        self._listener.close()
        if left:
            raise TransportError(
                f"NCCL did not end its communicators with {', '.join(str(link.theirs) for link in left)} within "
                f"{most:g} s; their memory may still be touched, and nothing but the end of this process can change that"
            )

    def _arm(self) -> None:
        """Have ``poll`` called when the next thing is due."""
        self.wakeup.at(min([*self._due.values(), *(due for _, due in self._strangers.values())], default=None))

    # Links

    def _step(self, number: int, now: float) -> None:
        link = self.links.get(number) or self._ending.get(number)
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
            if not self.closed:
                self._woken.append(number)
                self.wakeup.set()

    # Connections that have not said yet which link they belong to

    def _take_in(self, now: float) -> None:
        for _ in range(STRANGERS):
            sock = accept(self._listener, self.wakeup)
            if sock is None:
                return
            if len(self._strangers) >= STRANGERS:
                self._dismiss(next(iter(self._strangers))).close()
            number = self.number()
            channel = Channel(sock)
            self._strangers[number] = channel, now + GREET_S
            self.wakeup.add(channel.fileno(), number)
            self._woken.append(number)

    def _greet(self, now: float) -> None:
        for number, (channel, due) in list(self._strangers.items()):
            if due <= now:
                self._dismiss(number)
                channel.close()

    def _dismiss(self, number: int) -> Channel:
        channel, _ = self._strangers.pop(number)
        self.wakeup.remove(channel.fileno())
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
        if not isinstance(hello, Greeting):
            channel.close()
        elif hello.yours in self._offered and hello.yours not in self._early:
            self._early[hello.yours] = channel, hello  # until connect is called here too
        else:
            link = next((k for k in self.links.values() if k.mine.token == hello.yours), None)
            if link is None:
                channel.say(Bye("the other side does not know this link (it closed it, or was restarted)"))
                channel.close()
            else:
                self._introduce(link, channel, hello)

    def _introduce(self, link: Link, channel: Channel, hello: Greeting) -> None:
        if link.theirs.token != hello.mine:
            channel.close()
            return
        link.accept(channel)
        self._wake(link.number)
