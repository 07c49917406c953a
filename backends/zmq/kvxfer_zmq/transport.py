"""The transport: one ROUTER socket that all peers speak to, and a ``Link`` for each of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import zmq

from kvxfer import clock
from kvxfer.backend import Base
from kvxfer.backend.endpoint import check_encryption, new_token
from kvxfer.errors import TransportError
from kvxfer.transport import Batch, Capabilities, Fence, Probe, Verb
from kvxfer_zmq.bytestream import FRAME, ByteStream
from kvxfer_zmq.connection import NOBLOCK, Connection, receive, waiting
from kvxfer_zmq.curve import Keys
from kvxfer_zmq.endpoint import Endpoint
from kvxfer_zmq.link import Half, Link
from kvxfer_zmq.options import Options
from kvxfer_zmq.wire import Header, Kind, routing_id, split_routing_id

KNOCKS = 64
"""Connections that are admitted or turned away in one call of ``poll``."""

RETRY_S = 0.0005
"""How often memory that ZeroMQ still holds is looked at."""

TURN_S = 0.01
"""About how long one call of ``poll`` receives, and how long it sends, before it returns."""


class ZmqTransport(Base[Endpoint, Link]):
    """SEND and RECV of CPU memory. ``Options`` says what can be set."""

    name = "zmq"
    contract = 2
    inherits = frozenset({"listen", "advertise"})
    guarded = "always"
    tells_hosts = True
    encrypted_by = "encrypt"
    costs = {"cpu": 90}
    capabilities = Capabilities(
        verbs=frozenset({Verb.SEND, Verb.RECV}), elastic=True, run_bytes=512, may_block_s=3 * TURN_S
    )
    last_resort = True
    libraries = {"pyzmq": ("pyzmq",)}
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        self._keys = Keys() if self._options.encrypt else None
        super().__init__(agent, options)
        self._ends: dict[bytes, Link | None] = {}  # by our token, with the link if there is one by now
        self._open: dict[int, Link] = {}  # links, closed ones as well while something of them has not ended
        self._directory: str | None = None
        self._context = zmq.Context(self._options.io_threads)
        self._context.set(zmq.MAX_SOCKETS, 16384)
        self._doorbell = self._context.socket(zmq.REP)
        self._doorbell.bind("inproc://zeromq.zap.01")  # where ZeroMQ asks about peers that connect
        self._inbox = self._context.socket(zmq.ROUTER)
        try:
            self._address = self._listen()
        except zmq.ZMQError as e:
            self.close()
            where = f"{self._options.listen} port {self._options.port}"
            raise TransportError(f"back end 'zmq' of {agent!r} cannot listen on {where}: {e}") from e
        self.wakeup.add(self._inbox.fileno(), "inbox")
        self.wakeup.add(self._doorbell.fileno(), "doorbell")

    @classmethod
    def probe(cls) -> Probe:
        facts = {"pyzmq": zmq.pyzmq_version(), "libzmq": zmq.zmq_version()}
        return Probe(True, "ZeroMQ works everywhere; it moves CPU memory", frozenset({"cpu"}), facts)

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        mine = Endpoint(self.agent, self._address, new_token(), b"" if self._keys is None else self._keys.public)
        self._ends[mine.token] = None
        return mine

    def drop_endpoint(self, mine: Endpoint) -> None:
        del self._ends[mine.token]

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        check_encryption(theirs, here=bool(mine.key), there=bool(theirs.key))
        if not theirs.hosts and self._options.protocol != "ipc":
            raise TransportError(
                f"{theirs.agent!r} is reached over ipc, and this side uses tcp",
                advice="set option 'protocol' of back end 'zmq' to the same value on both",
            )
        try:
            connection = Connection(self._context, self._options, self._keys, mine, theirs, self.wakeup, number)
        except zmq.ZMQError as e:
            raise TransportError(f"no link to {theirs.agent!r} can be made: {e}") from e
        within_s = self._options.connect_timeout_s
        link = Link(number, mine, theirs, connection, within_s, self.complete, self._say_bye)
        self._ends[mine.token] = self._open[number] = link
        return link

    def drop_link(self, number: int, link: Link) -> None:
        del self._ends[link.mine.token]
        link.lose("the link was closed here", "the other side closed the link")

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        addresses = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths)
        link.submit(Half(number, after, batch.verb, batch.stream, ByteStream(addresses, batch.lengths)))

    def batch_moved(self, number: int, link: Link) -> int:
        return link.flights[number].passed

    def stop(self, number: int, link: Link) -> None:
        link.abort(number)

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        now = clock.now()
        self._admit()
        self._receive(now + TURN_S)
        until, again = clock.now() + TURN_S, False
        for number, link in list(self._open.items()):
            if number in readable or link.talks or link.retires:
                again |= link.advance(now, until)
            if number not in self.links and not link.flights:
                del self._open[number]
        # ZeroMQ's descriptors tell of changes only, and sending may have taken note of one.
        if again or waiting(self._inbox) or waiting(self._doorbell):
            self.wakeup.set()
        self.wakeup.at(now + RETRY_S if any(link.retires for link in self._open.values()) else None)

    def shut_down(self) -> None:
        for link in self._open.values():
            link.lose("closed here", "the other side shut down")
        self._inbox.close(0)
        self._doorbell.close(0)
        # Ends ZeroMQ's threads; none of them can read our memory after this.
        self._context.term()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _listen(self) -> str:
        """Bind the inbox; returns the address for peers."""
        o, inbox = self._options, self._inbox
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.MAXMSGSIZE, FRAME + 4096)
        if self._keys is None:
            inbox.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            self._keys.listen(inbox)
        inbox.setsockopt(zmq.ZAP_DOMAIN, b"kvxfer")
        inbox.setsockopt(zmq.HANDSHAKE_IVL, int(o.connect_timeout_s * 1000))
        if o.protocol == "ipc":
            self._directory = tempfile.mkdtemp(prefix="kvxfer-zmq-")
            inbox.bind(f"ipc://{self._directory}/inbox")
            return f"ipc://{self._directory}/inbox"
        inbox.setsockopt(zmq.IPV6, ":" in o.listen)
        inbox.bind(f"tcp://{_host(o.listen)}:{o.port or '*'}")
        port = inbox.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2]
        return f"tcp://{_host(o.host)}:{port}"

    def _admit(self) -> None:
        """Let those in who know one of our links (ZeroMQ's RFC 27 and 24): before that nothing of theirs is kept."""
        for _ in range(KNOCKS):
            if not waiting(self._doorbell):
                return
            request = self._doorbell.recv_multipart(NOBLOCK)
            if self._keys is None:
                known = request[5:6] == [b"PLAIN"] and len(request) == 8 and self._knows(request[7])
            else:
                known = request[5:6] == [b"CURVE"]  # it knows our public key; its messages show its link's tokens
            verdict = b"200" if known else b"400"
            self._doorbell.send_multipart(
                [b"1.0", request[1] if len(request) > 1 else b"", verdict, b"", b"", b""], NOBLOCK
            )

    def _knows(self, shown: bytes) -> bool:
        try:
            return bytes.fromhex(shown.decode()) in self._ends
        except ValueError:
            return False

    def _receive(self, until: float) -> None:
        """Hand what has arrived to its links. Strangers are told that nobody knows them, and forgotten."""
        while clock.now() < until and (frames := receive(self._inbox)):
            tokens = split_routing_id(frames[0].bytes)
            if tokens is None:
                continue  # a stranger
            mine, theirs = tokens
            link = self._ends.get(mine)
            if link is None and mine in self._ends:
                continue  # a peer whose HELLO our own will answer once connect is called
            if link is None or link.theirs.token != theirs:
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

    def _say_bye(self, link: Link, why: str) -> None:
        self._bye(routing_id(link.mine.token, link.theirs.token), why)

    def _bye(self, to: bytes, why: str) -> None:
        try:
            self._inbox.send_multipart([to, Header(Kind.BYE).encode(), why.encode()], NOBLOCK)
        except zmq.ZMQError:
            pass  # it is gone, or does not read; it will notice by itself


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
