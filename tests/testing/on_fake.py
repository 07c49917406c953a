"""The suite on the reference back end, whose peers live in this process: their network kills and stops them."""

from __future__ import annotations

from typing import ClassVar

from kvxfer.testing import ConformanceSuite, FakeTransport, Network
from kvxfer.testing.conformance import World
from kvxfer.testing.participant import LocalParticipant


class MortalFake(LocalParticipant):
    """Killed and stopped by its network."""

    network: Network

    def kill(self) -> None:
        self.network.kill(self.name)

    def stop(self) -> None:
        self.network.stop(self.name)

    def resume(self) -> None:
        self.network.resume(self.name)


class OnFake(ConformanceSuite):
    """Its options name a network."""

    backend = FakeTransport
    network: ClassVar[Network | None] = None
    """Taken from the options, unless they have none."""
    gigabytes = False
    __test__ = False

    def make_mortal(self, world: World, name: str) -> MortalFake:
        participant = MortalFake(self.backend, self.options, name, self.memory)
        participant.network = self.network or self.options["network"]
        world.adopt(participant)
        return participant
