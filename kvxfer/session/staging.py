"""Staging memory: a bounded area cut into equal slots, through which staged parts pass packed.

Used by the data thread only. A link may hold at most half of the slots (its credits), so that one stopped
peer cannot starve the others.

No circle of engines may wait for each other's slots, however many there are. A producer holds a slot until its consumer
has one too; so a consumer keeps ``RESERVED`` slots for pieces of which it knows that their producer has one already. What
holds these ends without anybody else's slot, therefore whatever is announced moves in the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvxfer import memory
from kvxfer.geometry import CopyPlan, Region
from kvxfer.session.values import LinkId, Role
from kvxfer.transport import Fence

__all__ = ["SLOTS", "Slot", "Staging"]

SLOTS = 8
"""Slots an area is cut into: enough to overlap packing, moving and unpacking, few enough to keep pieces long."""


RESERVED = SLOTS // 4
"""Slots that neither a producer's pieces nor those a consumer merely expects may take."""

_MOST = {"producer": SLOTS // 2, "consumer": SLOTS - RESERVED}
_EXPECTED = SLOTS - RESERVED - _MOST["producer"]


@dataclass(frozen=True)
class Slot:
    offset: int
    owner: LinkId
    role: Role


class Staging:
    """``nbytes`` of staging on ``device`` (pinned if it is host memory under a GPU cache) for a cache's ``regions``."""

    def __init__(self, regions: tuple[Region, ...], nbytes: int, device: str) -> None:
        self._space = memory.space(regions)
        self.piece_bytes = nbytes // SLOTS // 4096 * 4096
        if self.piece_bytes <= 0:
            raise ValueError(f"staging_bytes of {nbytes} is too small; give at least {SLOTS * 4096}")
        pinned = device == "cpu" and any(r.device != "cpu" for r in regions)
        self._buffer = memory.allocate(self.piece_bytes * SLOTS, device, pinned=pinned)
        self.reset()

    @property
    def region(self) -> Region:
        return self._buffer.region

    def reset(self) -> None:
        """All slots are free: nothing can touch them any more."""
        self._free = [i * self.piece_bytes for i in range(SLOTS)]
        self._held: Counter[LinkId] = Counter()
        self._ways: Counter[Role] = Counter()
        self.given = 0  # how many slots have come back

    def take(self, owner: LinkId, role: Role, sure: bool = True) -> Slot | None:
        """A free slot for a link, or ``None`` while there is none or the credits of link or direction are used up.
        ``sure``: whether it will be used without a further slot of the peer's."""
        most = _MOST[role] if sure else _EXPECTED
        if not self._free or self._held[owner] >= SLOTS // 2 or self._ways[role] >= most:
            return None
        self._held[owner] += 1
        self._ways[role] += 1
        return Slot(self._free.pop(), owner, role)

    def give(self, slot: Slot) -> None:
        """Return a slot that nothing touches any more."""
        self._held[slot.owner] -= 1
        if not self._held[slot.owner]:
            del self._held[slot.owner]
        self._ways[slot.role] -= 1
        self.given += 1
        self._free.append(slot.offset)

    def pack(self, plan: CopyPlan, slot: Slot) -> Fence:
        """Gather the plan's source side into a slot; the fence passes when the bytes are there."""
        return self._space.pack(plan, self._buffer, slot.offset)

    def unpack(self, plan: CopyPlan, slot: Slot) -> Fence:
        """Scatter a slot into the plan's destination side."""
        return self._space.unpack(plan, self._buffer, slot.offset)
