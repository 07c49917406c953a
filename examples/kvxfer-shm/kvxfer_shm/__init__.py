"""A whole back end: pieces of memory that both processes map, handed over through a socket that wakes the other."""

# --8<-- [start:endpoint]
import fcntl
import os
import struct
from collections import deque
from mmap import mmap
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from kvxfer.backend import Base, EndpointBase, LinkBase, LivenessLinks, RunCursor, Submitted
from kvxfer.backend.door import DoorName
from kvxfer.backend.endpoint import Token, new_token
from kvxfer.settings import read
from kvxfer.transport import Capabilities, Probe, Verb

PIECE = struct.Struct("<QQQ")  # stream, bytes of the batch, bytes of this piece: sent with its memory, answered by b"A"
WINDOW = 8  # pieces unanswered


class Options(Struct, frozen=True):
    """What can be set."""

    piece_bytes: Annotated[int, Meta(ge=4096, le=16 << 20)] = 1 << 20


class Endpoint(EndpointBase, frozen=True):
    """Where this side listens, on this host only; ``end`` is random, and a process that does not know it is not let in."""

    backend, format = "shm", 2
    name: DoorName
    end: Token


# --8<-- [end:endpoint]


# --8<-- [start:half]
class Half(Submitted):
    """A submitted batch."""

    def __init__(self, number, after, batch, runs):
        super().__init__(number, after)
        self.batch, self.cursor = batch, RunCursor(runs)


# --8<-- [end:half]


# --8<-- [start:link]
class ShmLink(LinkBase):
    """``sends`` and ``recvs`` have bytes to be copied; ``answers``: the SEND that ends with each answer, if one does."""

    def __init__(self, lines, line, done):
        super().__init__(done)
        self.lines, self.line = lines, line
        self.sends, self.recvs, self.answers = {}, {}, deque()

    def greet(self):
        return self.line.up

    def failed(self, half, why):
        return f"{half.batch.verb} of {half.batch.nbytes} bytes with {self.line.peer} failed: {why}"

    def post(self, half):
        (self.sends if half.batch.verb is Verb.SEND else self.recvs)[half.batch.stream] = half

    def bye(self, cause, says):
        """End all batches: nobody else has their memory, so they are quiet."""
        self.lines.hang_up(self.line)
        for half in list(self.flights.values()):
            self.end(half, cause)

    # --8<-- [end:link]

    # --8<-- [start:fill]
    def fill(self, piece_bytes):
        """Hand over the next piece of the first SEND; returns whether there is one."""
        half = next(iter(self.sends.values()), None)
        if half is None or len(self.answers) == WINDOW:
            return False
        batch, cursor = half.batch, half.cursor
        nbytes, fd = min(cursor.left, piece_bytes), os.memfd_create("kvxfer-shm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes or 1)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = mmap(fd, 0)
            cursor.gather(np.frombuffer(memory, np.uint8).ctypes.data, nbytes)
            self.line.tell(PIECE.pack(batch.stream, batch.nbytes, nbytes), fd)
        finally:
            os.close(fd)
        self.answers.append(None if cursor.left else self.sends.pop(batch.stream))
        return True

    # --8<-- [end:fill]

    # --8<-- [start:empty]
    def empty(self):
        """Take in the oldest message, if it can be; returns whether it was, and the batch that has ended with it."""
        message, fds = self.line.heard[0]
        if message == b"A" and self.answers:
            self.line.heard.popleft()
            return True, self.answers.popleft()
        stream, total, nbytes = PIECE.unpack(message)
        half = self.recvs.get(stream)
        if half is None:
            return False, None
        if total != half.batch.nbytes or not fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"stream {stream} has {total} bytes, not {half.batch.nbytes}, or its memory could vanish")
        memory = mmap(fds[0], nbytes or 1)
        half.cursor.scatter(np.frombuffer(memory, np.uint8).ctypes.data, nbytes)
        os.close(self.line.heard.popleft()[1][0])
        self.line.tell(b"A")
        return True, None if half.cursor.left else self.recvs.pop(stream)

    # --8<-- [end:empty]


# --8<-- [start:transport]
class ShmTransport(Base):
    """Shared memory between processes of one host."""

    name, contract, guarded, tells_hosts, costs = "shm", 2, "always", True, {"cpu": 30}
    capabilities = Capabilities(frozenset({Verb.SEND, Verb.RECV}), elastic=True, abort="peer")
    endpoint_type = Endpoint

    def __init__(self, agent, options):
        self.options = read(Options, options, "option {!r} of back end 'shm'")
        super().__init__(agent, options)
        self.lines = LivenessLinks("shm", self.wakeup)

    @classmethod
    def probe(cls):
        return Probe(True, "Linux shares memory between its processes", frozenset({"cpu"}))

    # --8<-- [end:transport]

    # --8<-- [start:connect]
    def make_endpoint(self, memories, writable):
        end = new_token()
        self.lines.offer(end)
        return Endpoint(self.agent, self.lines.name, end)

    def drop_endpoint(self, mine):
        self.lines.withdraw(mine.end)

    def make_link(self, number, mine, theirs):
        line = self.lines.connect(mine.end, theirs.end, theirs.name, repr(theirs.agent), self.control)
        return ShmLink(self.lines, line, self.complete)

    def drop_link(self, number, link):
        link.lose("the link was closed here")

    # --8<-- [end:connect]

    # --8<-- [start:batches]
    def start(self, number, link, batch, after):
        runs = self.memories.runs(batch.local, batch.local_offsets, batch.lengths)
        link.submit(Half(number, after, batch, runs))

    def stop(self, number, link):
        link.lose("aborted here, with all that was in flight on its link")

    # --8<-- [end:batches]

    # --8<-- [start:advance]
    def advance(self, readable):
        self.lines.handle(readable)
        if [link for link in self.links.values() if link.broken is None and self.step(link)]:
            self.wakeup.set()

    def step(self, link):
        """Go on with a link; returns whether there was something to do."""
        try:
            more, ended = link.empty() if link.line.heard else (False, None)
            more |= link.fill(self.options.piece_bytes)
        except (OSError, ValueError, LookupError, struct.error) as e:
            link.lose(str(e))
            return False
        if ended is not None:
            link.end(ended)
        if not more and link.line.down is not None:
            link.lose(link.line.down)
        return more

    def shut_down(self):
        self.lines.close()

    # --8<-- [end:advance]
