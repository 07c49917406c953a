"""The fake keeps the contract with any subset of verbs, so that the session's tests over it prove something."""

from typing import Any, ClassVar

from kvxfer.testing import ConformanceSuite, FakeTransport, Network
from kvxfer.testing.conformance import World
from kvxfer.testing.participant import LocalParticipant


class MortalFake(LocalParticipant):
    """Killed and stopped by its network, since it lives in this process."""

    network: Network

    def kill(self) -> None:
        self.network.kill(self.name)

    def stop(self) -> None:
        self.network.stop(self.name)

    def resume(self) -> None:
        self.network.resume(self.name)


class OnFake(ConformanceSuite):
    backend = FakeTransport
    gigabytes = False
    __test__ = False

    def make_mortal(self, world: World, name: str) -> MortalFake:
        participant = MortalFake(self.backend, self.options, name, self.memory)
        participant.network = self.options["network"]
        world.adopt(participant)
        return participant


class TestFakeReads(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["read"]}


class TestFakeWrites(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["write"]}


class TestFakeSends(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network(), "verbs": ["send", "recv"]}


class TestFakeWithEverything(OnFake):
    options: ClassVar[dict[str, Any]] = {"network": Network()}


class TestFakeThatMustBePolled(OnFake):
    """No descriptor to wake by, an abort that takes the whole peer along, memory that is quiet only after closing."""

    options: ClassVar[dict[str, Any]] = {"network": Network(), "wakeup": False, "abort": "peer", "quiet": "peer_close"}


class TestFakeThatGetsQuietLater(OnFake):
    """A failed batch goes on for a while, and then it is said that it has become quiet."""

    options: ClassVar[dict[str, Any]] = {"network": Network(), "quiet": "later"}
