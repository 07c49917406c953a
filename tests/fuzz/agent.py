"""What must hold for any frames at a live agent and its directory, from strangers, from a peer that fetches from it, and
from a peer that it fetches from: no thread ends, nothing goes unhandled, memory stays, and honest work goes on.

The first byte of an input says by whom it is sent, the rest is the frame.
"""

from __future__ import annotations

import gc
import logging
import resource
import threading
import time
from collections.abc import Iterator

import msgspec

from kvxfer.config import Config
from kvxfer.control.sockets import ControlConnection, ControlSockets
from kvxfer.errors import PeerError
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Released
from kvxfer.security import OPEN
from kvxfer.testing.engine import AgentEngine, PagedMemory
from kvxfer.testing.fake import FakeTransport
from kvxfer.values import BlockTable, Fetch, Offer
from tests.control.stranger import Stranger, hello
from tests.fuzz.frames import T

PREFIXES = [bytes([who]) for who in range(4)]
EVERY = 512
"""Frames between two looks at the agent's health."""
ENDPOINT = FakeTransport("rogue", {"verbs": ["read"]}).endpoint()


class Unhandled(logging.Handler):
    """Remembers the exceptions that somebody logged instead of handling."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.records.append(record)


class Rig:
    def __init__(self) -> None:
        self.level = logging.getLogger("kvxfer").level
        logging.getLogger("kvxfer").setLevel(logging.ERROR)
        self.unhandled = Unhandled()
        logging.getLogger("kvxfer").addHandler(self.unhandled)
        config = Config.from_mapping(
            {
                "backend": "kvxfer.testing.fake:FakeTransport",
                "backend_options": {"verbs": ["read"]},
                "transfer_timeout": 1.0,
                "lease": 0.5,
                "peer_timeout": 5.0,
                "staging_bytes": 1 << 16,
            }
        )
        self.engine = AgentEngine(config, PagedMemory(seed=1), name="fuzzed")
        (self.agent,), (self.cache,) = self.engine.agents, self.engine.memory.caches
        self.directory = self.engine.directory
        self.names, self.fetching = 0, False
        # Somebody whom the agent fetches from, a directory and a rank of our own; and all of ours that speak to it.
        self.rogue, self.rogue_directory, self.ours = (ControlSockets(OPEN) for _ in range(3))
        self.rogue_port, self.directory_port = (h.listen("127.0.0.1", 0) for h in (self.rogue, self.rogue_directory))
        self.consumer_of_rogue: ControlConnection | None = None
        self.attempt = 0
        self.addresses = [self.agent.descriptor.address] * 2 + [f"tcp://127.0.0.1:{self.directory.source.port}"]
        self.begin()

    def begin(self) -> None:
        self.speakers = [self._dial(who) for who in range(3)]
        self.work()

    def _dial(self, who: int) -> ControlConnection:
        """A peer (0) says hello, strangers at the agent (1) and at the directory (2) do not."""
        connection = self.ours.dial(self.addresses[who], None, m.MAX_BYTES)
        if who == 0:
            connection.send(self.hello())
        return connection

    def hello(self) -> m.Hello:
        return hello(self.engine, epoch=5, engine="rogue", endpoint=ENDPOINT)

    def work(self) -> None:
        """Give the agent something that frames can be about."""
        self.names += 1
        table = BlockTable.of([[3, 1, 7]])
        self.agent.offer(Offer(T, b"digest", self.names, 12, table, True))
        source = Source("127.0.0.1", self.directory_port, 77)
        for event in self.agent.events():
            self.fetching &= not (isinstance(event, Released) and event.role == "consumer")
        if not self.fetching:  # else its blocks are still in use
            self.agent.fetch(Fetch(f"fetch {self.names}", T, b"digest", source, BlockTable.of([[4, 2, 6]]), 0, 12))
            self.fetching = True
        self.directory.notices()

    def throw(self, data: bytes) -> None:
        who, frame = data[0] % 4 if data else 0, data[1:]
        if who == 3:
            if self.consumer_of_rogue is not None:
                self.consumer_of_rogue.send_frame(self.timely(frame))
        else:
            if self.speakers[who].lost is not None:  # it was hung up on, for what it had said before
                self.speakers[who] = self._dial(who)
            self.speakers[who].send_frame(frame)
            while self.speakers[who].held > 1 << 16:
                self.drain()  # the agent has not read what was said before
                time.sleep(0.001)

    def timely(self, frame: bytes) -> bytes:
        """A producer's message about the attempt that is under way, if it is one."""
        try:
            msg = m.decode(frame)
        except PeerError:
            return frame
        if isinstance(msg, m.PartReady | m.Checksums | m.AttemptClosed | m.CommitAck | m.SlotReady):
            return m.encode(msgspec.structs.replace(msg, transfer=T, attempt=self.attempt))
        return frame

    def drain(self) -> None:
        """Read what the agent says, and play the part of a peer so far that links stay and its fetch goes on."""
        self.speakers[0].send(m.Ping(1))
        for _, _ in self._heard(self.ours):
            pass
        for asker, _ in self._heard(self.rogue_directory):
            rank = m.RankDescriptor(f"tcp://127.0.0.1:{self.rogue_port}", 78, self.cache, (self.agent.config.backend,))
            asker.send(m.EngineDescriptor(m.PROTOCOL, "rogue", 77, (rank,)))
        for asker, frame in self._heard(self.rogue):
            match m.decode(frame):
                case m.Hello():
                    self.consumer_of_rogue = asker
                    asker.send(m.Welcome(78, ENDPOINT, 4096))
                case m.FetchRequest(attempt=attempt):
                    self.attempt = attempt
                case m.Ping(number=number):
                    asker.send(m.Pong(number))
        for sockets in (self.rogue, self.rogue_directory):
            sockets.flush()

    @staticmethod
    def _heard(sockets: ControlSockets) -> Iterator[tuple[ControlConnection, bytes]]:
        sockets.flush()
        sockets.poll(0)
        for connection in sockets.ready():
            while (frame := connection.receive()) is not None:
                yield connection, frame

    def check(self) -> None:
        """The agent is well: it answers a new acquaintance, and its work ends."""
        self.drain()
        assert not self.unhandled.records, self.unhandled.records[0].getMessage()
        names = {t.name for t in threading.enumerate()}
        assert {"kvxfer-control", "kvxfer-data", "kvxfer-dir"} <= names, "a thread has ended"
        for address, question, answer in (
            (self.agent.descriptor.address, self.hello(), m.Welcome),
            (f"tcp://127.0.0.1:{self.directory.source.port}", m.Lookup(m.PROTOCOL), m.EngineDescriptor),
        ):
            with Stranger(address, 20.0) as s:
                s.say(question)
                found = s.answer()
                assert isinstance(found, answer), found
        for connection in self.speakers:
            self.ours.drop(connection)
        self.begin()

    def close(self) -> None:
        for sockets in (self.ours, self.rogue, self.rogue_directory):
            sockets.close()
        self.engine.close()
        logging.getLogger("kvxfer").removeHandler(self.unhandled)
        logging.getLogger("kvxfer").setLevel(self.level)


rig: Rig
thrown = 0
first = 0


def begin() -> None:
    global rig
    rig = Rig()


def one(data: bytes) -> None:
    """Throw a frame; look after the agent now and then."""
    global thrown, first
    rig.throw(data)
    thrown += 1
    if thrown % 32 == 0:
        rig.drain()
    if thrown % EVERY == 0:
        rig.check()
    if thrown % (64 * EVERY) == 0:
        gc.collect()
        now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        first = first or now
        print(f"{thrown} frames, {now} MiB at most", flush=True)
        assert now < 2 * first + 200, f"memory grows: {first} MiB, then {now} MiB"
    if thrown % 8 == 0:
        time.sleep(0)
