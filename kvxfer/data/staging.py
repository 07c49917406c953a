"""Staging memory: a bounded area cut into equal slots, through which staged parts pass packed.

Used by the data thread only. A single link that needs slots may hold half of them; several links share them; and the last free
one is for a link that has none, so that a peer that has stopped does not keep others from theirs. A producer's last free one
is kept for a link that takes its pieces at once; all links that have lost one share one slot (``slot_usage.py``). If links that
have stopped hold all slots, ``since`` tells which have been held for longest.

Engines must never wait for each other's slots in a circle, however many there are. A producer holds a slot until its consumer
has one too; so ``RESERVED`` slots are kept for pieces whose producer, as the consumer knows, has a slot already. Pieces in
these end without another slot, so whatever is announced moves in the end. As many are kept for producers, because consumers
may wait for one of theirs.

A device may still be packing into a slot, or unpacking it, when its piece has ended. Such a slot is not reused until the
device is done, or it could overwrite what a peer sends into it next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvxfer import clock, memory
from kvxfer.config import MIN_PIECE, SLOTS
from kvxfer.data.slot_usage import SlotUsage
from kvxfer.errors import KvxferError
from kvxfer.geometry import CopyPlan, Region
from kvxfer.logs import logger
from kvxfer.memory.blame import checked_fence, space_error
from kvxfer.protocol.values import LinkId, Role
from kvxfer.transport import Fence

log = logger("kvxfer.data")

RESERVED = SLOTS // 4
"""The number of slots that only pieces known to a consumer may take; and of those that only a producer's pieces may take."""

CREDITS = SLOTS // 2
"""The most slots that a link may hold, and that may be held for pieces that are only expected."""

TICK_S = 0.0001
"""Seconds between two checks of a thread that waits for the device."""

Use = Literal["sent", "known", "expected"]
"""What a slot is for: ``sent``, a producer's piece; ``known``, a consumer's piece whose producer has a slot, or needs this one
first; ``expected``, a consumer's piece whose producer may not have a slot yet."""


@dataclass(frozen=True)
class Slot:
    """A place in staging memory that is in use."""

    offset: int
    owner: LinkId  # the link that holds it
    use: Use


class Staging:
    """Staging memory for a cache."""

    def __init__(self, regions: tuple[Region, ...], nbytes: int, device: str) -> None:
        self._space = memory.space(regions)
        self.piece_bytes = nbytes // SLOTS // MIN_PIECE * MIN_PIECE
        self._buffer = memory.allocate(self.piece_bytes * SLOTS, device, beside=self._space.device)
        self._busy: dict[int, Fence] = {}  # by slot: the device's last work there, until it is done
        self.usage = SlotUsage()
        self.reset()

    @property
    def region(self) -> Region:
        return self._buffer.region

    def reset(self) -> None:
        """Free all slots, once no back end can touch them any more. Those in which the device is at work are taken after that."""
        self._free = [i * self.piece_bytes for i in range(SLOTS)]
        self._held: dict[Role, Counter[LinkId]] = {"producer": Counter(), "consumer": Counter()}
        self._since: dict[Slot, float] = {}  # producer: when a slot was taken, the oldest first
        self._used: dict[Use, int] = {"sent": 0, "known": 0, "expected": 0}
        self.taken = self.given = 0  # how many slots have been taken, and have come back

    def take(self, owner: LinkId, role: Role, sure: bool = True) -> Slot | None:
        """Take a free slot for a link; ``None`` while no slot is free, or the credits of link or use are used up.

        ``sure``: a consumer's slot will be used without its peer having to wait for a slot of its own.
        """
        use: Use = "sent" if role == "producer" else "known" if sure else "expected"
        if not self._may(owner, role, use):
            return None
        free = next((at for at in reversed(self._free) if self._idle(at)), None)
        if free is None:
            return None
        self._free.remove(free)
        self._held[role][owner] += 1
        self._used[use] += 1
        self.taken += 1
        slot = Slot(free, owner, use)
        if role == "producer":
            self._since[slot] = clock.now()
        return slot

    def _may(self, owner: LinkId, role: Role, use: Use) -> bool:
        room, holders = self._room(use), self._held[role]
        if role == "producer" and self.usage.stalled(owner):
            return room > 1 and not any(self.usage.stalled(other) for other in holders)
        if owner not in holders:
            return room > 1 or (room > 0 and not (role == "producer" and self.usage.reserved(owner, holders)))
        mine = holders[owner]
        return room > 1 and mine < min(CREDITS, (SLOTS - RESERVED) // len(holders))

    def _room(self, use: Use) -> int:
        """Return how many more slots may be taken for this use."""
        used, most = self._used, SLOTS - RESERVED
        room = len(self._free)
        if use != "sent":
            room = min(room, most - used["known"] - used["expected"])
        if use != "known":
            room = min(room, most - used["sent"] - used["expected"])
        return min(room, CREDITS - used["expected"]) if use == "expected" else room

    @property
    def used(self) -> bool:
        """Whether any slot is in use."""
        return any(self._used.values())

    def room(self, role: Role) -> bool:
        """Return whether there is a free slot for this role."""
        return self._room("sent") > 0 if role == "producer" else max(self._room("known"), self._room("expected")) > 0

    def gives(self, owner: LinkId) -> bool:
        """Return whether a producer's job of this link could take a slot now."""
        return self._may(owner, "producer", "sent")

    def holds(self, owner: LinkId, role: Role) -> bool:
        return owner in self._held[role]

    @property
    def since(self) -> Mapping[Slot, float]:
        """The slots that a producer's pieces hold, and since when, the oldest first."""
        return self._since

    def _idle(self, at: int) -> bool:
        fence = self._busy.get(at)
        if fence is None or fence.passed():
            self._busy.pop(at, None)
            return True
        return False

    @property
    def settling(self) -> bool:
        """Whether the device is still at work in a slot that is otherwise free, so that it pays to ask again soon."""
        return bool(self._busy) and any(not self._idle(at) for at in self._free)

    def work(self) -> list[Fence]:
        """Return the fences of all that the device has still to do. One that has failed does nothing any more."""
        try:
            return [self._busy[at] for at in list(self._busy) if not self._idle(at)]
        except BaseException:
            log.exception("the device failed while it packed or unpacked")
            self._busy.clear()
            return []

    def wait(self, until: float) -> bool:
        """Block until the device has done all its work, which takes as long as one copy of the slots.

        Stop waiting at this time of ``kvxfer.clock``. Return whether the device is done.
        """
        while True:
            now = clock.now()  # before it looks: the process may stand still in between
            if not self.work():
                return True
            if now >= until:
                return False
            clock.wait(TICK_S)

    def give(self, slot: Slot) -> None:
        """Give back a slot that no back end touches any more."""
        holders = self._held["producer" if slot.use == "sent" else "consumer"]
        holders[slot.owner] -= 1
        if not holders[slot.owner]:
            del holders[slot.owner]
        if slot.use == "sent":
            self.usage.held(slot.owner, clock.now() - self._since.pop(slot))
        self._used[slot.use] -= 1
        self.given += 1
        self._free.append(slot.offset)

    def pack(self, plan: CopyPlan, slot: Slot) -> Fence:
        """Gather the plan's source side into a slot; the fence passes when the bytes are there.

        Raises:
            SpaceError: The space failed, or returned no fence.
        """
        try:
            fence = self._space.pack(plan, self._buffer, slot.offset)
        except Exception as e:
            raise self.failed("pack", e) from e
        return self._begun(slot, "pack", fence)

    def unpack(self, plan: CopyPlan) -> Callable[[Slot], Fence]:
        """Prepare to scatter a slot into the plan's destination side; return a function that does it once.

        Raises:
            SpaceError: The space failed. The function raises it too, or if it got no fence.
        """
        try:
            begin = self._space.prepare_unpack(plan, self._buffer)
        except Exception as e:
            raise self.failed("prepare_unpack", e) from e

        def unpack(slot: Slot) -> Fence:
            try:
                fence = begin(slot.offset)
            except Exception as e:
                raise self.failed("unpack", e) from e
            return self._begun(slot, "unpack", fence)

        return unpack

    def failed(self, call: str, error: BaseException) -> KvxferError:
        """Return the error for what a call of the space raised."""
        return space_error(type(self._space), self._space.device, call, error)

    def _begun(self, slot: Slot, call: str, fence: Fence) -> Fence:
        self._busy[slot.offset] = checked_fence(type(self._space), self._space.device, call, fence)
        return fence
