"""Back ends that use what the contract leaves them: the suite must let them pass."""

from __future__ import annotations

import time
from typing import Any

from kvxfer.testing import FakeTransport
from kvxfer.transport import Completion, Quieted


class GetsQuietLater(FakeTransport):
    """Its batches get quiet some time after they have failed."""

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, {**options, "quiet": "later"})


class WithdrawsLate(FakeTransport):
    """Forgets endpoints in ``poll``, which is called after any other method."""

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        self.withdrawn: list[bytes] = []

    def withdraw(self, endpoint: bytes) -> None:
        self.withdrawn.append(endpoint)

    def poll(self) -> list[Completion | Quieted]:
        while self.withdrawn:
            super().withdraw(self.withdrawn.pop())
        return super().poll()


class HeldUpOnce(FakeTransport):
    """Its host did something else in the middle of a call, as hosts do."""

    held_up = False

    def poll(self) -> list[Completion | Quieted]:
        if not HeldUpOnce.held_up:
            HeldUpOnce.held_up = True
            time.sleep(0.3)
        return super().poll()
