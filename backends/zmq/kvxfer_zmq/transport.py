"""The transport: one ROUTER socket that all peers speak to, and a ``Link`` for each of them."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from kvxfer.errors import TransportError
from kvxfer.geometry.cache import Region
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, Probe, Transport, Verb
from kvxfer.transport.memories import Memories
from kvxfer.transport.wakeup import Wakeup
from kvxfer_zmq.bytestream import FRAME, ByteStream
from kvxfer_zmq.connection import NOBLOCK, readable, receive
from kvxfer_zmq.link import Link, Post
from kvxfer_zmq.options import Options
from kvxfer_zmq.wire import Endpoint, Header, Kind, new_token, routing_id, split_routing_id

__all__ = ["ZmqTransport"]

KNOCKS = 64
"""Connections that are admitted or turned away in one call of ``poll``."""

TURN_S = 0.01
"""About how long one call of ``poll`` receives, and how long it sends, before it returns."""


class ZmqTransport(Transport):
    """SEND and RECV of CPU memory. Options: see ``kvxfer_zmq.options.Options``. Only the thread that made it may
    use it."""

    name = "zmq"
    contract = 1
    inherits = frozenset({"listen", "advertise"})
    guarded = "always"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self._options = Options.parse(options)
        self._capabilities = Capabilities(
            verbs=frozenset({Verb.SEND, Verb.RECV}),
            memory=frozenset({"cpu"}),
            same_host=self._options.protocol == "ipc",
            run_bytes=512,
            may_block_s=3 * TURN_S,
        )
        self._thread = threading.current_thread()
        self._memories = Memories()
        self._in_use: dict[int, int] = {}
        self._pending: dict[bytes, Endpoint] = {}
        self._links: dict[int, Link] = {}
        self._by_token: dict[bytes, int] = {}
        self._hot: set[int] = set()
        self._completions: list[Completion] = []
        self._numbers = 0
        self._sealed = self._closed = False
        self._directory: str | None = None
        self._context = zmq.Context(self._options.io_threads)
        self._context.set(zmq.MAX_SOCKETS, 16384)
        self._wakeup = Wakeup()
        self._doorbell = self._context.socket(zmq.REP)
        self._doorbell.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks about whoever connects
        self._inbox = self._context.socket(zmq.ROUTER)
        try:
            self._address = self._listen()
        except zmq.ZMQError as e:
            self.close()
            where = f"{self._options.listen} port {self._options.port}"
            raise TransportError(f"back end 'zmq' of {agent!r} cannot listen on {where}: {e}") from e
        self._wakeup.add(self._inbox.fileno(), "inbox")
        self._wakeup.add(self._doorbell.fileno(), "doorbell")

    @classmethod
    def probe(cls) -> Probe:
        facts = {"pyzmq": zmq.pyzmq_version(), "libzmq": zmq.zmq_version()}
        return Probe(True, "ZeroMQ works everywhere; it moves CPU memory", frozenset({"cpu"}), facts)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def register(self, regions: Sequence[Region]) -> int:
        self._check()
        if self._sealed:
            raise TransportError("memory must be registered before the first endpoint is made")
        return self._memories.add(regions)

    def deregister(self, memory: int) -> None:
        self._check()
        if memory in self._in_use.values():
            raise TransportError(f"memory {memory} is in use by a batch in flight; abort it and poll first")
        self._memories.remove(memory)

    def endpoint(self) -> bytes:
        self._check()
        self._sealed = True
        mine = Endpoint(self.agent, self._address, new_token())
        self._pending[mine.token] = mine
        return mine.encode()

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._check()
        own, their = Endpoint.decode(mine), Endpoint.decode(theirs)
        if self._pending.get(own.token) != own:
            raise TransportError("the first argument of connect is no unused endpoint of this transport")
        if own.token == their.token:
            raise TransportError("both endpoints are the same; connect takes one of each side")
        del self._pending[own.token]
        number = self._number()
        self._links[number] = Link(
            number, own, their, self._context, self._options, self._wakeup, self._complete, self._say_bye
        )
        self._by_token[own.token] = number
        self._heat(number)
        return number

    def withdraw(self, endpoint: bytes) -> None:
        self._check()
        self._pending.pop(Endpoint.decode(endpoint).token, None)

    def disconnect(self, peer: int) -> None:
        self._check()
        link = self._links.get(peer)
        if link is not None:
            self._by_token.pop(link.mine.token, None)
            link.cut("the link was closed here", "the other side closed the link")
            self._heat(peer)

    def lost(self, peer: int) -> str | None:
        link = self._links.get(peer)
        return None if link is None else link.broken

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._check()
        link = self._links.get(batch.peer)
        if link is None or link.mine.token not in self._by_token:
            raise TransportError(f"there is no link {batch.peer}")
        if batch.verb not in (Verb.SEND, Verb.RECV) or not isinstance(batch, Batch):
            raise TransportError("back end 'zmq' takes SEND and RECV of runs, nothing else")
        if link.uses(batch.verb, batch.stream):
            raise TransportError(f"stream {batch.stream} comes too late on link {batch.peer}: their numbers must rise")
        addresses = self._memories.addresses(batch.local, batch.local_offsets, batch.lengths)
        number = self._number()
        self._in_use[number] = batch.local
        link.post(Post(number, batch.verb, batch.stream, ByteStream(addresses, batch.lengths), after))
        self._heat(batch.peer)
        return number

    def poll(self) -> list[Completion]:
        self._check()
        now = time.monotonic()
        fired = self._wakeup.clear()
        self._admit()
        self._receive(now + TURN_S)
        hot = {
            number: link
            for number, link in self._links.items()
            if number in fired or number in self._hot or (link.due is not None and link.due <= now)
        }
        self._hot.clear()
        until = time.monotonic() + TURN_S
        for number, link in hot.items():
            if link.advance(now, until):
                self._hot.add(number)
            if link.mine.token not in self._by_token and not link.busy:
                del self._links[number]
        # ZeroMQ's descriptors tell of changes only, and sending may have taken note of one.
        if self._hot or readable(self._inbox) or readable(self._doorbell):
            self._wakeup.set()
        self._wakeup.at(min((k.due for k in self._links.values() if k.due is not None), default=None))
        done, self._completions = self._completions, []
        return done

    def abort(self, batch: int) -> None:
        self._check()
        for number, link in self._links.items():
            if link.abort(batch):
                self._heat(number)
                return

    def close(self) -> None:
        if self._closed:
            return
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            raise TransportError(f"the transport of {self.agent!r} belongs to another thread, which is still alive")
        for link in self._links.values():
            link.cut("closed here", "the other side shut down")
        self._closed = True
        self._inbox.close(0)
        self._doorbell.close(0)
        # Ends ZeroMQ's threads; none of them can read our memory after this.
        self._context.term()
        self._wakeup.close()
        self._links.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def fileno(self) -> int | None:
        return self._wakeup.fileno()

    def _listen(self) -> str:
        """Bind the inbox; returns the address for peers."""
        o, inbox = self._options, self._inbox
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.MAXMSGSIZE, FRAME + 4096)
        inbox.setsockopt(zmq.PLAIN_SERVER, 1)
        inbox.setsockopt(zmq.ZAP_DOMAIN, b"kvxfer")
        inbox.setsockopt(zmq.HANDSHAKE_IVL, int(o.connect_timeout_s * 1000))
        if o.protocol == "ipc":
            self._directory = tempfile.mkdtemp(prefix="kvxfer-zmq-")
            inbox.bind(f"ipc://{self._directory}/inbox")
            return f"ipc://{self._directory}/inbox"
        inbox.setsockopt(zmq.IPV6, ":" in o.listen)
        inbox.bind(f"tcp://{_host(o.listen)}:{o.port or '*'}")
        port = inbox.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2]
        return f"tcp://{_host(o.advertise or o.listen)}:{port}"

    def _admit(self) -> None:
        """Let those in who know one of our links (ZeroMQ's RFC 27 and 24): before that nothing of theirs is kept."""
        for _ in range(KNOCKS):
            if not readable(self._doorbell):
                return
            request = self._doorbell.recv_multipart(NOBLOCK)
            known = request[5:6] == [b"PLAIN"] and len(request) == 8 and self._knows(request[7])
            verdict = b"200" if known else b"400"
            self._doorbell.send_multipart(
                [b"1.0", request[1] if len(request) > 1 else b"", verdict, b"", b"", b""], NOBLOCK
            )

    def _knows(self, shown: bytes) -> bool:
        try:
            token = bytes.fromhex(shown.decode())
        except ValueError:
            return False
        return token in self._pending or token in self._by_token

    def _receive(self, until: float) -> None:
        """Hand what has arrived to its links. Strangers are told that nobody knows them, and forgotten."""
        while time.monotonic() < until and (frames := receive(self._inbox)):
            tokens = split_routing_id(frames[0].bytes)
            if tokens is None or tokens[0] in self._pending:
                continue  # a stranger, or a peer whose HELLO our own will answer once connect is called
            number = self._by_token.get(tokens[0])
            link = self._links.get(number) if number is not None else None
            if number is None or link is None or link.theirs.token != tokens[1]:
                self._bye(frames[0].bytes, "the other side does not know this link (it closed it, or was restarted)")
                continue
            try:
                if len(frames) != 3:
                    raise ValueError(f"a message of {len(frames)} frames")
                header = Header.decode(frames[1].bytes)
            except ValueError as e:
                link.violated(e)
            else:
                link.take(header, frames[2].buffer)
            self._hot.add(number)

    def _say_bye(self, link: Link, why: str) -> None:
        self._bye(routing_id(link.mine.token, link.theirs.token), why)

    def _bye(self, to: bytes, why: str) -> None:
        try:
            self._inbox.send_multipart([to, Header(Kind.BYE).encode(), why.encode()], NOBLOCK)
        except zmq.ZMQError:
            pass  # it is gone, or does not read; it will notice by itself

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _heat(self, number: int) -> None:
        if not self._hot:  # else it was set for another, and not cleared since
            self._wakeup.set()
        self._hot.add(number)

    def _complete(self, completion: Completion) -> None:
        self._in_use.pop(completion.batch, None)
        self._completions.append(completion)

    def _check(self) -> None:
        if self._closed:
            raise TransportError(f"the transport of {self.agent!r} is closed")
        if threading.current_thread() is not self._thread:
            raise TransportError(f"the transport of {self.agent!r} belongs to the thread that made it")


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
