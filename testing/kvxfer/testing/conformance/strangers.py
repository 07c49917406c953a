"""Who reaches a port of this side, or is named as its peer, and does not know the secret of a link."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection, Iterator
from itertools import count, islice

import numpy as np
import pytest

from kvxfer.backend.endpoint import EndpointBase
from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.conformance.participant_link import ParticipantLink, TransferMode
from kvxfer.testing.conformance.suite import Suite, World
from kvxfer.testing.forging import guesses, ports, redirected
from kvxfer.testing.participant import Result
from kvxfer.transport.guard import guarded

N = 1 << 16
RUN = Runs.of([4096], [8192], [32_768])
WAIT_S = 0.03
"""How long a batch with a stranger goes on at least before the link is closed."""


class Strangers(Suite):
    """Clauses about who is let in, and to whom bytes are sent."""

    def guessed(self, genuine: bytes, spare: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield an endpoint with a secret that is wrong in one byte, each with words that tell what was altered.

        ``spare`` is another endpoint of the same side: what differs is secret. Override it if that is not so.
        """
        yield from guesses(genuine, spare, self._trusted())

    def test_strangers_move_nothing(self, world: World, way: TransferMode) -> None:
        """Who knows where this side listens, and all but one byte of a link's secrets, moves nothing over that link.

        Nor does this side move anything with such a peer, which may call without listening, or listen without calling. Compare the
        whole secret, of each connection or of each message, before anything is served, sent or taken in. A back end that is not
        ``guarded`` does not claim this.
        """
        if not guarded(self.backend, self.options.get("listen", "127.0.0.1")):
            pytest.skip(f"guarded is {self.backend.guarded!r}")
        scene = _Scene(world, way, self.notice_s)
        a, b = scene.a, scene.b
        try:
            link, began = world.link(a, b), thread_clock()
            world.move(link, way, b, a, RUN)
            scene.wait_s = max(WAIT_S, 2 * (thread_clock() - began))
            before = {participant: participant.content(0) for participant in (a, b)}
            for which in count():
                number, mute = divmod(which, 3)  # 0: both are within reach; 1: b is not; 2: a is not
                mine, spare, theirs = a.endpoint(), a.endpoint(), b.endpoint()
                guess = next(islice(self.guessed(mine, spare), number, None), None)
                a.withdraw(spare)
                if guess is None:
                    break
                what, wrong = guess
                here = scene.silent(theirs, self._trusted()) if mute == 1 else theirs
                there = scene.silent(wrong, self._trusted()) if mute == 2 else wrong
                if mute and (here, there) == (theirs, wrong):  # endpoints name no port
                    a.withdraw(mine)
                    b.withdraw(theirs)
                    continue
                ended = scene.play((mine, here), (theirs, there))
                assert all(r.error is not None for r in ended), f"{what}: a batch with a stranger succeeded"
                for participant, content in before.items():
                    assert_equal(participant.content(0), content, f"{what}: the memory of {participant.name}")
        finally:
            scene.listener.close()
        assert which, (
            "`guarded` promises a secret, and no endpoint has one; or override `guessed`, which does not find it"
        )
        world.move(link, way, a, b, RUN)

    def test_memory_is_sent_to_the_peer_only(self, world: World, way: TransferMode) -> None:
        """Who listens where a peer's endpoint says, and has not shown this side's secret, is sent no memory.

        The peer may have named any port. Wait until the other end of a connection, or the sender of a message, has shown what only
        the peer knows, and send there. What a library takes on trust (``EndpointBase.trusted``) is left as it is.
        """
        scene, pattern = _Scene(world, way, self.notice_s), secrets.token_bytes(16)
        a, b = scene.a, scene.b
        a.write(0, 0, np.frombuffer(pattern * (N // len(pattern)), np.uint8))
        try:
            for which in count():
                mine, theirs = a.endpoint(), b.endpoint()
                place = next(islice(ports(theirs, self._trusted()), which, None), None)
                if place is None:
                    break
                scene.play((mine, redirected(theirs, [place], scene.listener.port)), (theirs, mine))
                heard = scene.listener.heard.values()
                assert not any(pattern in said for said in heard), f"memory was sent to the port in field {place}"
        finally:
            scene.listener.close()
        if not which:
            pytest.skip("its endpoints name no port")

    def _trusted(self) -> set[int]:
        kind = getattr(self.backend, "endpoint_type", EndpointBase)
        return {i for i, field in enumerate(kind.__struct_fields__) if field in kind.trusted}


class _Listener:
    """A port on which somebody takes whatever comes, by TCP and UDP, and says nothing."""

    def __init__(self) -> None:
        self.heard: dict[socket.socket, bytes] = {}
        while True:
            self._listening = socket.create_server(("127.0.0.1", 0))
            self.port: int = self._listening.getsockname()[1]
            messages = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                messages.bind(("127.0.0.1", self.port))
                break
            except OSError:  # another process has that one
                messages.close()
                self._listening.close()
        self._listening.setblocking(False)
        self._take(messages)

    def hear(self) -> None:
        """Take what has come, without waiting."""
        try:
            while True:
                self._take(self._listening.accept()[0])
        except BlockingIOError:
            pass
        for source in self.heard:
            try:
                while data := source.recv(1 << 16):
                    self.heard[source] += data
            except OSError:  # there is no more
                pass

    def close(self) -> None:
        for one in (self._listening, *self.heard):
            one.close()

    def _take(self, source: socket.socket) -> None:
        source.setblocking(False)
        self.heard[source] = b""


class _Scene:
    """Two participants, and somebody who listens and says nothing. ``wait_s``: how long a batch goes on before its link is closed."""

    def __init__(self, world: World, way: TransferMode, notice_s: float) -> None:
        self._world, self._way, self._notice_s = world, way, notice_s
        self.wait_s = 2 * WAIT_S
        self.a, self.b, self.listener = world.local(), world.other(), _Listener()
        for seed, participant in enumerate((self.a, self.b)):
            participant.allocate([N], seed)

    def silent(self, endpoint: bytes, kept: Collection[int]) -> bytes:
        """Return an endpoint with the listener's port in place of its own."""
        return redirected(endpoint, ports(endpoint, kept), self.listener.port)

    def play(self, of_a: tuple[bytes, bytes], of_b: tuple[bytes, bytes]) -> list[Result]:
        """Connect both, each with its own endpoint and what it takes for the other's; try to move both ways, and close the link."""
        world, sides, link = self._world, (self.a, self.b), ParticipantLink({})
        for participant, (own, other) in zip(sides, (of_a, of_b), strict=True):
            try:
                link.peers[participant.name] = participant.connect(own, other)
            except TransportError:
                participant.withdraw(own)
                link.peers[participant.name] = -1
        halves = [
            half for source, target in (sides, sides[::-1]) for half in link.halves(self._way, source, target, RUN)
        ]
        started = [world.submit(participant, batch) for participant, batch in halves]
        until = thread_clock() + self.wait_s
        while thread_clock() < until and not all(s.over() for s in started):
            world.turn()
            self.listener.hear()
        for participant in sides:
            if link.peers[participant.name] >= 0:
                participant.disconnect(link.peers[participant.name])
        world.promptly(lambda: all(s.over() for s in started), "batches end once their link is closed", self._notice_s)
        self.listener.hear()
        return world.finish(*started)
