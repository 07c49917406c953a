"""The jobs that wait for a slot of staging memory: whose turn it is when one is free, and which job must give one up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import inf

from kvxfer import clock
from kvxfer.data.jobs import Job
from kvxfer.data.staging import Slot, Staging
from kvxfer.protocol.values import LinkId, PartRef, Role

PATIENCE_S = 0.5
"""How long a consumer may hold a slot while another has waited as long for its first one. A piece takes milliseconds, so one that
takes this long waits for a consumer that has stopped."""
NEW, NEW_BYTES_S = 50, 1e9
"""Once consumers have stopped, a new one may hold a slot for a 50th of that while another waits, and for as long as a slot full of
bytes takes at this rate in bytes per second."""


class SlotQueue:
    """Jobs that wait for a slot, by role and link. Used by the data thread only."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._waiting: dict[Role, dict[LinkId, dict[PartRef, Job]]] = {"producer": {}, "consumer": {}}
        self._starved: dict[LinkId, float] = {}  # since when a link to a consumer has no slot and wants one
        self._last_first = True  # whether the next slot is for the link that came last, of those that have used none
        self._leaving: dict[Slot, float] = {}  # slots that jobs have to give up, and since when they hold them
        self.look_at = inf  # when a job may have to give up its slot next

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def waits(self, role: Role) -> bool:
        return bool(self._waiting[role])

    def add(self, job: Job) -> None:
        """Have a job wait, after those of its link that wait already."""
        link, role = job.ref.link, job.ref.role
        self._waiting[role].setdefault(link, {})[job.ref] = job
        if role == "producer" and not self._staging.holds(link, role):
            self._starved.setdefault(link, clock.now())
        elif role == "producer":
            self._starved.pop(link, None)

    def remove(self, job: Job) -> None:
        """Take a job out of the queue, if it waits."""
        waiting = self._waiting[job.ref.role]
        mine = waiting.get(job.ref.link)
        if mine is not None and mine.pop(job.ref, None) is not None and not mine:
            del waiting[job.ref.link]
            if job.ref.role == "producer":
                self._starved.pop(job.ref.link, None)

    def feed(self, advance: Callable[[Job], None]) -> None:
        """Give free slots to jobs; those of a producer first for the consumers that have held slots for the least time.

        ``advance`` lets a job go on; it takes a slot if it can, and then waits no more.
        """
        for role, waiting in self._waiting.items():
            if not waiting or not self._staging.room(role):
                continue
            for link in self._by_rank(waiting) if role == "producer" else list(waiting):
                if role == "producer" and not self._staging.gives(link):
                    continue
                while self._staging.room(role) and (mine := waiting.get(link)):
                    job, taken = next(iter(mine.values())), self._staging.taken
                    starved = link in self._starved
                    advance(job)
                    if starved and self._staging.taken != taken:
                        self._last_first = not self._last_first
                    if job.ref in mine and self._staging.taken != taken:
                        for ref in [r for r in mine if r[:-1] == job.ref[:-1]]:
                            mine[ref] = mine.pop(ref)  # the next slot is for another transfer, which may be short
                    if job.starving:
                        break  # the link's other jobs would get none either

    def _by_rank(self, links: Iterable[LinkId]) -> list[LinkId]:
        """Return links in the order of their turns. Unused ones take turns from both ends, so a newcomer is served soon."""
        order = list(links)
        if len(order) < 2:
            return order
        return sorted(reversed(order) if self._last_first else order, key=self._staging.usage.rank)

    def stalled_holders(self, jobs: Collection[Job]) -> list[Job]:
        """Return jobs that must give up their slots, which they have held for too long while consumers wait for their first one.

        As many are returned as consumers wait, and one for all that have stalled. Those that have held slots for longest come first.
        The caller must have these jobs stopped. ``look_at`` is then when there may be others.
        """
        self.look_at = inf
        if not self._starved:
            return []
        now, usage, since = clock.now(), self._staging.usage, self._staging.since
        self._leaving = {slot: taken for slot, taken in self._leaving.items() if since.get(slot) == taken}
        first = PATIENCE_S / NEW + self._staging.piece_bytes / NEW_BYTES_S
        found: list[Job] = []
        for stalled in (False, True):
            waiting = [at for link, at in self._starved.items() if usage.stalled(link) == stalled]
            if stalled:
                waiting = waiting[:1]
            for slot, taken in since.items():
                if len(self._leaving) >= len(waiting):
                    break
                if slot in self._leaving or (stalled and not usage.stalled(slot.owner)):
                    continue
                patience = usage.patience(slot.owner, PATIENCE_S, first)
                at = max(taken + patience, waiting[0] + patience - first)
                if at > now:
                    self.look_at = min(self.look_at, at)
                elif holder := next((job for job in jobs if job.error is None and slot in job.slots), None):
                    self._leaving |= {each: since[each] for each in holder.slots}
                    usage.lose(slot.owner)
                    found.append(holder)
        return found
