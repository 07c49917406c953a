"""What NCCL leaves to the back end: faults that the conformance suite cannot know, for the fake and for NCCL itself."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.backend.endpoint import new_token
from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.testing.conformance import Started, Suite, TransferMode, World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.participant import LocalParticipant, Participant
from kvxfer.transport import Batch, Verb
from kvxfer_nccl.binding import PipeSpec
from kvxfer_nccl.channel import Channel
from kvxfer_nccl.endpoint import Endpoint
from kvxfer_nccl.wire import Bye, Greeting, Id, Message, Opened, Ready, Received, Retire, Sent

SMALL = Runs.of([0], [0], [1000])
LARGE = Runs.of([0], [0], [3_000_000])


class Impostor:
    """Speaks a link's talk to a transport, and opens no communicator: a peer that does what the test says."""

    name = "impostor"

    def __init__(self, world: World, victim: LocalParticipant, sends: bool) -> None:
        self._world = world
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._taken: list[socket.socket] = []
        theirs = Endpoint.decode(victim.endpoint())
        mine = Endpoint(
            self.name,
            "127.0.0.1",
            self._listener.getsockname()[1],
            new_token(),
            "elsewhere",
            theirs.channels,
            theirs.release,
        )
        self.peer = victim.connect(theirs.encode(), mine.encode())
        if theirs.token < mine.token:
            world.wait_for(self._knocked, "a connection")
            self.channel = Channel(self._taken[0])
        else:
            self.channel = Channel(socket.create_connection((theirs.host, theirs.port), 5))
        self.channel.say(Greeting(theirs.token, mine.token))
        self.expect(Greeting)
        self.verb = Verb.RECV if sends else Verb.SEND  # of the victim

    def _knocked(self) -> bool:
        try:
            self._taken.append(self._listener.accept()[0])
        except BlockingIOError:
            pass
        return bool(self._taken)

    def expect(self, kind: type[Message]) -> Any:
        """The victim's next message, which must be of this kind."""
        found: list[Message] = []

        def heard() -> bool:
            found.extend(self.channel.hear(1))
            return bool(found)

        self._world.wait_for(heard, f"a {kind.__name__}")
        assert isinstance(found[0], kind), found
        return found[0]

    def close(self) -> None:
        self.channel.close()
        self._listener.close()


class Faults(Suite):
    """``pipe``: the class that fulfils ``Pipe``. ``peers``: how many join and leave, ``loops``: how often.

    ``moment_s``: a step of making a communicator takes no less. ``idle_s``: how long one rests before it is closed. ``spared``: how much
    more of each of ``used`` may be in use in the end.
    """

    __test__ = False

    options: ClassVar[Mapping[str, Any]] = {"init_timeout_s": 3.0, "abort_timeout_s": 10.0}
    pipe: ClassVar[type[Any]]
    peers: ClassVar[int] = 20
    loops: ClassVar[int] = 5
    moment_s: ClassVar[float] = 0.002
    idle_s: ClassVar[float] = 1.0
    spared: ClassVar[tuple[int, ...]] = 0, 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = hasattr(cls, "pipe")

    def participant(self, world: World, nbytes: int = 4 << 20, **options: Any) -> LocalParticipant:
        """One with options of its own."""
        options = {**self.options, **options}
        participant = LocalParticipant(self.backend, options, world._name("special"), world._device())
        world.adopt(participant)
        participant.allocate([nbytes], 3)
        return participant

    @pytest.fixture
    def impostor(self, world: World) -> Iterator[Any]:
        made: list[Impostor] = []

        def make(victim: LocalParticipant, sends: bool) -> Impostor:
            made.append(Impostor(world, victim, sends))
            return made[-1]

        yield make
        for impostor in made:
            impostor.close()

    def test_sizes_that_differ_end_the_link_and_name_both(self, world: World) -> None:
        a, b, link = world.pair()
        [(_, sent), (_, received)] = link.halves(TransferMode.SEND, a, b, LARGE)
        received = replace(received, lengths=np.array([2_000_000]))
        for result in world.finish(Started([(a, a.submit(sent)), (b, b.submit(received))])):
            assert result.error is not None and "3000000" in result.error and "2000000" in result.error
        world.move(world.link(a, b), TransferMode.SEND, a, b, LARGE)

    def test_streams_that_differ_end_the_link(self, world: World) -> None:
        """The sender skipped one: its next would end in the memory of another batch."""
        a, b, link = world.pair()
        [_, (_, received)] = link.halves(TransferMode.SEND, a, b, SMALL)
        [(_, sent), _] = link.halves(TransferMode.SEND, a, b, SMALL)
        for result in world.finish(Started([(a, a.submit(sent)), (b, b.submit(received))])):
            assert result.error is not None and "stream" in result.error

    @pytest.mark.parametrize("dies", [True, False])
    @pytest.mark.parametrize("sends", [True, False])
    def test_a_peer_that_dies_or_stops_in_init(self, world: World, impostor: Any, sends: bool, dies: bool) -> None:
        """It agreed to make a communicator, and is gone, or never joins. Others are served meanwhile, and afterwards."""
        a, c = world.local(), world.local()
        world.allocate(a, c)
        other = world.link(a, c)
        peer = impostor(a, sends)
        started = self._begin(a, peer)
        if dies:
            peer.close()
        world.move(other, TransferMode.SEND, a, c, LARGE)
        [result] = world.finish(started)
        assert result.error is not None and "impostor" in result.error and (result.quiet or not dies)
        world.move(other, TransferMode.SEND, c, a, LARGE)

    def _begin(self, victim: LocalParticipant, peer: Impostor) -> Started:
        """Bring the victim into NCCL's init, from which it does not come back by itself."""
        batch = Batch(peer.verb, peer.peer, 0, LARGE.length, LARGE.src)
        started = Started([(victim, victim.submit(batch))])
        if peer.verb is Verb.SEND:
            peer.channel.say(Ready(0))
            peer.expect(Id)
        else:
            peer.expect(Ready)
            peer.channel.say(Id(0, victim.transport._binding.unique_id()))  # type: ignore[attr-defined]
        return started

    @pytest.mark.parametrize("verb", [Verb.SEND, Verb.RECV])
    def test_a_peer_that_dies_while_bytes_move(self, world: World, verb: Verb) -> None:
        """NCCL itself would wait for it without an end."""
        a, b = world.local(), world.mortal()
        world.allocate(a, b)
        link = world.link(a, b)
        source, target = (a, b) if verb is Verb.SEND else (b, a)
        world.move(link, TransferMode.SEND, source, target, SMALL)
        mine = [next(h for h in link.halves(TransferMode.SEND, source, target, LARGE) if h[0] is a) for _ in range(4)]
        started = Started([(a, a.submit(batch)) for _, batch in mine])
        world.run(0.1)  # so that NCCL has them
        assert not started.begun_to_end()
        b.kill()
        results = world.finish(started, seconds=self.notice_s)
        assert all(r.error is not None and b.name in r.error and r.quiet for r in results)
        after = a.content(0)
        world.run(0.2)
        assert_equal(a.content(0), after, "memory that was quiet")

    def test_a_communicator_in_error(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b, link = world.pair()
        world.move(link, TransferMode.SEND, a, b, SMALL)
        [(_, sent), (_, received)] = link.halves(TransferMode.SEND, a, b, LARGE)
        started = Started([(a, a.submit(sent))])
        monkeypatch.setattr(self.pipe, "error", lambda pipe: "unhandled cuda error")
        [result] = world.finish(started)
        assert result.error is not None and "unhandled cuda error" in result.error and result.quiet
        [result] = world.finish(Started([(b, b.submit(received))]))
        assert result.error is not None and a.name in result.error
        monkeypatch.undo()
        world.move(world.link(a, b), TransferMode.SEND, a, b, LARGE)

    def test_an_operation_that_is_refused(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b, link = world.pair()
        world.move(link, TransferMode.SEND, a, b, SMALL)

        move = self.pipe.move

        def refuse(pipe: Any, *runs: Any) -> None:
            if pipe._spec.sends:
                raise TransportError("invalid usage")
            move(pipe, *runs)

        monkeypatch.setattr(self.pipe, "move", refuse)
        for result in world.finish(link.start(TransferMode.SEND, a, b, LARGE)):
            assert result.error is not None
        monkeypatch.undo()
        world.move(world.link(a, b), TransferMode.SEND, a, b, LARGE)

    def test_an_abort_that_takes_long_stops_nobody(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b, link = world.pair()
        c = world.local()
        world.allocate(c)
        other = world.link(a, c)
        world.move(link, TransferMode.SEND, a, b, SMALL)
        world.move(other, TransferMode.SEND, a, c, SMALL)
        go_on, abort = threading.Event(), self.pipe.abort
        monkeypatch.setattr(self.pipe, "abort", lambda pipe: (go_on.wait(30), abort(pipe)))
        [(_, sent), _] = link.halves(TransferMode.SEND, a, b, LARGE)
        started = Started([(a, a.submit(sent))])
        world.run(0.1)
        a.abort(started.halves[0][1])
        world.move(other, TransferMode.SEND, a, c, LARGE)
        assert not started.over(), "it ended before its memory was quiet"
        go_on.set()
        [result] = world.finish(started)
        assert result.error is not None and result.quiet

    def test_an_abort_without_end_leaves_memory_in_use(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """The batch ends in time all the same, and says that it is not quiet."""
        b = world.local()
        a = self.participant(world, abort_timeout_s=0.3)
        world.allocate(b)
        link = world.link(a, b)
        world.move(link, TransferMode.SEND, a, b, SMALL)
        go_on, abort = threading.Event(), self.pipe.abort
        monkeypatch.setattr(self.pipe, "abort", lambda pipe: (go_on.wait(30), abort(pipe)))
        [(_, sent), _] = link.halves(TransferMode.SEND, a, b, LARGE)
        started = Started([(a, a.submit(sent))])
        world.run(0.1)
        a.abort(started.halves[0][1])
        [result] = world.finish(started)
        assert result.error is not None and not result.quiet
        with pytest.raises(TransportError):
            a.transport.deregister(0)
        go_on.set()
        world.wait_for(lambda: all(link.over for link in a.transport.links.values()), "the end of the abort")  # type: ignore[attr-defined]

    def test_two_sides_with_unlike_channels_take_the_fewer(self, world: World) -> None:
        """NCCL fails with an internal error where they differ."""
        a, b = self.participant(world, channels=16), self.participant(world, channels=4)
        link = world.link(a, b)
        for source, target in ((a, b), (b, a)):
            world.move(link, TransferMode.SEND, source, target, LARGE)

    def test_idle_communicators_are_closed_and_made_anew(self, world: World) -> None:
        a, b = self.participant(world, idle_close_s=self.idle_s), self.participant(world, idle_close_s=self.idle_s)
        link = world.link(a, b)
        for _ in range(3):
            world.move(link, TransferMode.SEND, a, b, LARGE)
            world.move(link, TransferMode.SEND, b, a, SMALL)
            assert open_pipes(a) == open_pipes(b) == 2
            world.wait_for(lambda: open_pipes(a) == open_pipes(b) == 0, "the closing of idle communicators")

    def test_a_transfer_may_come_while_an_idle_communicator_closes(self, world: World) -> None:
        a, b = self.participant(world, idle_close_s=0.001), self.participant(world, idle_close_s=0.001)
        link = world.link(a, b)
        for i in range(20 if self.memory == "cpu" else 5):
            world.move(link, TransferMode.SEND, a, b, Runs.of([i], [i], [1000 + i]))

    @pytest.mark.parametrize(
        "word",
        [
            Id(0, b"x" * 128),
            Opened(0),
            Received(0),
            Retire(0),
            Greeting(b"\0" * 16, b"\1" * 16),
            Ready(5),
            Bye("enough"),
        ],
        ids=lambda word: type(word).__name__,
    )
    def test_a_peer_that_says_what_it_must_not_costs_its_link_only(
        self, world: World, impostor: Any, word: Message
    ) -> None:
        a, b, link = world.pair()
        peer = impostor(a, sends=False)
        started = Started([(a, a.submit(Batch(Verb.SEND, peer.peer, 0, LARGE.length, LARGE.src)))])
        peer.channel.say(word)
        [result] = world.finish(started)
        assert result.error is not None and "impostor" in result.error
        world.move(link, TransferMode.SEND, a, b, SMALL)

    def test_a_flood_of_announcements_costs_the_link(self, world: World, impostor: Any) -> None:
        a = world.local()
        world.allocate(a)
        peer = impostor(a, sends=True)
        started = Started([(a, a.submit(Batch(Verb.RECV, peer.peer, 0, LARGE.length, LARGE.src)))])
        peer.expect(Ready)
        for stream in range(5000):
            peer.channel.say(Sent(stream, 1))
            if stream % 100 == 0:
                world.turn(0)
        [result] = world.finish(started)
        assert result.error is not None and "streams" in result.error

    @pytest.mark.parametrize("sends", [True, False])
    @pytest.mark.parametrize("disconnects", [True, False])
    def test_who_leaves_while_a_communicator_is_made(self, world: World, sends: bool, disconnects: bool) -> None:
        """In each moment of the making. Who is in NCCL's init already must not wait there for ever."""
        a, b = world.local(), world.other()
        world.allocate(a, b)
        source, target = (a, b) if sends else (b, a)

        def part(moment: int) -> None:
            link = world.link(a, b)
            started = link.start(TransferMode.SEND, source, target, SMALL)
            for _ in range(moment):
                world.turn(self.moment_s)
            mine = next(half for half in started.halves if half[0] is a)
            if disconnects:
                a.disconnect(link.peers[a.name])
            else:
                a.abort(mine[1])
                world.finish(Started([mine]))
                a.disconnect(link.peers[a.name])
            world.finish(started)
            b.disconnect(link.peers[b.name])

        part(40)
        world.run(1.0)
        before = self.used()
        for moment in range(24):
            part(moment)
        world.wait_for(lambda: not a.transport._ending and not b.transport._ending, "the end of the links")  # type: ignore[attr-defined]
        world.wait_for(lambda: self.released(before), "the release")

    def _invited(self, world: World, victim: LocalParticipant, peer: Impostor) -> tuple[Started, Any]:
        """Have the victim send, and make a communicator for it; return the send, and the peer's end of the communicator."""
        started = Started([(victim, victim.submit(Batch(Verb.SEND, peer.peer, 0, LARGE.length, LARGE.src)))])
        peer.channel.say(Ready(0))
        named = peer.expect(Id)
        transport: Any = victim.transport
        spec = PipeSpec(named.unique_id, False, world._device(), transport._options)
        return started, transport._binding.pipe(spec)

    def test_a_sender_does_not_go_before_the_receiver_has_come(self, world: World, impostor: Any) -> None:
        """NCCL may tell the sender that all is well while the receiver is still in a call that it would not come back from."""
        a = world.local()
        world.allocate(a)
        peer = impostor(a, sends=False)
        started, theirs = self._invited(world, a, peer)
        opening = threading.Thread(target=theirs.open)
        opening.start()
        a.disconnect(peer.peer)
        [result] = world.finish(started)
        assert result.error is not None and result.quiet
        world.wait_for(lambda: not opening.is_alive(), "the communicator")
        world.run(0.2)
        assert peer.channel.hear(1) == [] and peer.channel.lost is None
        peer.channel.say(Opened(0))
        peer.expect(Bye)
        theirs.abort()

    @pytest.mark.parametrize("comes", [True, False])
    def test_close_waits_for_a_silent_peer_and_then_for_the_abort(
        self, world: World, impostor: Any, monkeypatch: pytest.MonkeyPatch, comes: bool
    ) -> None:
        """A communicator is being made when this side closes, and the peer says nothing more. ``comes``: its NCCL does join.

        That wait leaves time for the abort. So memory is quiet when ``close`` returns.
        """
        a = self.participant(world, init_timeout_s=20.0, abort_timeout_s=4.0)
        _, theirs = self._invited(world, a, impostor(a, sends=False))
        if comes:
            coming = threading.Thread(target=theirs.open)
            coming.start()
            coming.join()
        abort = self.pipe.abort
        monkeypatch.setattr(self.pipe, "abort", lambda pipe: (time.sleep(0.2), abort(pipe)))
        a.close()
        theirs.abort()

    def test_close_serves_all_peers_while_one_is_silent(self, world: World, impostor: Any) -> None:
        """Communicators are being made with two. One says nothing until the other has had this side's last word."""
        a = self.participant(world, init_timeout_s=20.0, abort_timeout_s=20.0)
        silent, other = impostor(a, sends=False), impostor(a, sends=False)
        self._invited(world, a, silent)
        _, theirs = self._invited(world, a, other)
        said: list[Message] = []

        def come() -> None:
            theirs.open()
            other.channel.say(Opened(0))
            while not said and other.channel.lost is None:
                said.extend(other.channel.hear(1))
                time.sleep(0.001)
            silent.close()

        coming = threading.Thread(target=come)
        coming.start()
        begun = time.monotonic()
        a.close()
        assert time.monotonic() < begun + 10.0
        coming.join()
        assert isinstance(said[0], Bye)
        theirs.abort()

    def test_peers_join_and_leave_without_a_trace(self, world: World) -> None:
        """Device memory, descriptors and threads are what they were."""
        hub = self.peer(world)

        def loop() -> None:
            peers: list[Participant] = [self.peer(world) for _ in range(self.peers)]
            links = [world.link(hub, peer) for peer in peers]
            world.succeed(*(k.start(TransferMode.SEND, hub, p, SMALL) for k, p in zip(links, peers, strict=True)))
            for i, (link, peer) in enumerate(zip(links, peers, strict=True)):
                if i % 2:
                    hub.disconnect(link.peers[hub.name])
                peer.close()
                world.turn(0)
                if not i % 2:
                    hub.disconnect(link.peers[hub.name])
            world.run(0.05)

        loop()
        world.run(1.0)
        before = self.used()
        for _ in range(self.loops):
            loop()
        world.wait_for(lambda: self.released(before), "the release")

    def peer(self, world: World) -> LocalParticipant:
        """One with time for all communicators that are made at once."""
        return self.participant(world, 10_000, init_timeout_s=60.0)

    def used(self) -> tuple[int, ...]:
        """What must not grow."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def released(self, before: tuple[int, ...]) -> bool:
        """Whether no more is used than was before, but for what is ``spared``."""
        return all(now <= then + more for now, then, more in zip(self.used(), before, self.spared, strict=True))


def open_pipes(participant: LocalParticipant) -> int:
    """How many communicators a participant has."""
    links = participant.transport.links.values()  # type: ignore[attr-defined]
    return sum(
        direction.pipe is not None
        for link in links
        for direction in (link.direction(Verb.SEND), link.direction(Verb.RECV))
    )
