"""Endpoints that say what is not so: of a peer that has the deployment's key, and is hostile all the same."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from kvxfer.backend.endpoint import EndpointBase
from kvxfer.errors import TransportError
from kvxfer.geometry import Region, Runs
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.conformance.participant_link import ParticipantLink, Started, TransferMode
from kvxfer.testing.conformance.suite import Suite, World
from kvxfer.testing.forging import Bait, forgeries
from kvxfer.testing.participant import Buffer, Bytes, LocalParticipant, Participant

N = 1 << 16
RUN = Runs.of([4096], [8192], [4096])
WAIT_S = 0.2
"""How long a batch on a forged link may go on before the link is closed."""


class Forgeries(Suite):
    """A clause about what peers say of themselves."""

    def forged(self, genuine: bytes, bait: Bait) -> Iterator[tuple[str, bytes]]:
        """Yield forgeries of a peer's genuine endpoint, each with words that tell what was altered.

        By default those of ``kvxfer.testing.forging``, without the fields that ``EndpointBase.trusted`` names. Override it to add
        what only its author knows to be worth a try, such as two fields that must fit each other.
        """
        kind = getattr(self.backend, "endpoint_type", EndpointBase)
        return forgeries(genuine, bait, {i for i, field in enumerate(kind.__struct_fields__) if field in kind.trusted})

    def test_forged_endpoints_reach_nothing(self, world: World, way: TransferMode) -> None:
        """A peer cannot name a process, a file, a host or an address that was not registered for its link.

        Whatever its endpoint says (another process, this very one, an address beside its memory, more bytes, another
        participant's socket or secret), the link is refused or its batches fail, or move nothing but what that peer has
        itself. They end in time, and no other link suffers. Do not use an address, a process or a file because an
        endpoint names it. Have the kernel or the library say whose it is, or have its owner say it over a socket of which the kernel
        tells who is at its end (``kvxfer.backend.liveness``).
        """
        a, b, c = world.local(), world.mortal(), world.other()
        pattern = secrets.token_bytes(16)
        guarded = GuardedBuffer(N, self.device(0), pattern)
        bait_buffer = Buffer(N, self.device(0))
        bait_buffer.put(_filled(pattern, N))
        a._register([guarded])
        b.allocate([N], 1)
        c.allocate([N], 2)
        c.write(0, 0, _filled(pattern, N))
        spare = c.endpoint()
        scene = _Scene(world, way, a, b, c, guarded, bait_buffer, pattern, self.notice_s)
        file = tempfile.NamedTemporaryFile(prefix="kvxfer-bait-")  # noqa: SIM115 (it is closed below)
        try:
            file.write(pattern * (N // len(pattern)))
            file.flush()
            bait = Bait(bait_buffer.region.address, pattern, file.name, os.getpid(), spare)
            for which in count():  # each of an endpoint of its own, which the peer itself uses as it should
                genuine = b.endpoint()
                found = next(islice(self.forged(genuine, bait), which, None), None)
                if found is None:
                    break
                scene.play(found[0], genuine, found[1])
            c.withdraw(spare)
            c.fill(0, 3)
            guarded.put(np.zeros(N, np.uint8))
            world.move(world.link(a, c), way, c, a, RUN)
            scene.look("a genuine link afterwards")
        finally:
            file.close()
            a.close()
            bait_buffer.free()


class GuardedBuffer(Buffer):
    """Memory between two pieces of the same length, which nobody registers and nobody may touch or see."""

    def __init__(self, nbytes: int, device: str, pattern: bytes) -> None:
        super().__init__(3 * nbytes, device)
        self._guard = _filled(pattern, nbytes)
        self._nbytes = nbytes
        self.region = Region(self.region.address + nbytes, nbytes, device)
        super().write(0, self._guard)
        super().write(2 * nbytes, self._guard)

    def read(self, offset: int, nbytes: int) -> Bytes:
        return super().read(self._nbytes + offset, nbytes)

    def write(self, offset: int, data: Bytes) -> None:
        super().write(self._nbytes + offset, data)

    def check(self, what: str) -> None:
        """Fail if what is around it has changed."""
        for at in (0, 2 * self._nbytes):
            assert_equal(super().read(at, self._nbytes), self._guard, f"{what}: memory beside what was registered")


class _Scene:
    """The process under test (``a``), a hostile peer (``b``), and a third (``c``) that has nothing to do with it."""

    def __init__(
        self,
        world: World,
        way: TransferMode,
        a: LocalParticipant,
        b: Participant,
        c: Participant,
        guarded: GuardedBuffer,
        bait: Buffer,
        pattern: bytes,
        notice_s: float,
    ) -> None:
        self._world, self._way, self._a, self._b, self._c = world, way, a, b, c
        self._guarded, self._bait, self._pattern, self._notice_s = guarded, bait, pattern, notice_s
        self._theirs = c.content(0)

    def play(self, what: str, genuine: bytes, forged: bytes) -> None:
        """Connect ``a`` to a forgery, and ``b`` as it should; move something both ways; look at what has come of it."""
        a, b = self._a, self._b
        self._guarded.put(np.zeros(N, np.uint8))
        mine = a.endpoint()
        try:
            ours = a.connect(mine, forged)
        except TransportError:
            a.withdraw(mine)
            b.withdraw(genuine)
            return
        link = ParticipantLink({a.name: ours, b.name: b.connect(genuine, mine)})
        started = []
        for source, target in ((b, a), (a, b)):
            for participant, batch in link.halves(self._way, source, target, RUN):
                if participant is a or self._way is TransferMode.SEND:
                    try:
                        started.append(Started([(participant, participant.submit(batch))]))
                    except TransportError:
                        continue
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and not all(one.over() for one in started):
            self._world.turn()
        for participant in (a, b):
            participant.disconnect(link.peers[participant.name])
        self._world.promptly(
            lambda: all(one.over() for one in started), f"{what}: batches end once their link is closed", self._notice_s
        )
        self.look(what)

    def look(self, what: str) -> None:
        """Fail if anything was moved that is not the peer's."""
        self._guarded.check(what)
        size = self._bait.region.nbytes
        assert_equal(self._bait.get(), _filled(self._pattern, size), f"{what}: memory that nobody has registered")
        found = self._guarded.get().tobytes()
        assert self._pattern not in found, f"{what}: bytes have come from memory that was not registered for this link"
        if "afterwards" not in what:
            assert_equal(self._c.content(0), self._theirs, f"{what}: another participant's memory")


def _filled(pattern: bytes, nbytes: int) -> Bytes:
    return np.frombuffer(pattern * (nbytes // len(pattern)), np.uint8).copy()
