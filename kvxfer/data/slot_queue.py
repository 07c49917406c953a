"""The jobs that wait for a slot of staging memory: whose turn it is when one is free, and which job must give one up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvxfer.data.jobs import Job
from kvxfer.data.staging import Staging
from kvxfer.protocol.values import LinkId, PartRef, Role

__all__ = ["SlotQueue"]

PATIENCE_S = 1.0
"""How long a consumer may hold a slot while another has waited as long for its first one. A piece takes milliseconds, so one that
takes so long waits for a consumer that has stopped."""
IMPATIENCE = 4
"""By how much ``PATIENCE_S`` may become shorter while consumers that stop follow each other."""


class SlotQueue:
    """Jobs that wait for a slot, by role and link. Used by the data thread only."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._waiting: dict[Role, dict[LinkId, dict[PartRef, Job]]] = {"producer": {}, "consumer": {}}
        self._starved: dict[LinkId, float] = {}  # since when a link to a consumer has no slot and wants one
        self._gave_up = 0.0  # when jobs last had to give theirs up for that
        self._rounds = 0  # how often that has not been enough

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def waits(self, role: Role) -> bool:
        """Return whether a job in this role waits."""
        return bool(self._waiting[role])

    def add(self, job: Job) -> None:
        """Have a job wait, after those of its link that wait already."""
        link, role = job.ref.link, job.ref.role
        self._waiting[role].setdefault(link, {})[job.ref] = job
        if role == "producer" and not self._staging.holds(link, role):
            self._starved.setdefault(link, time.monotonic())
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
            for link in sorted(waiting, key=self._staging.usage.rank) if role == "producer" else list(waiting):
                while self._staging.room(role) and (mine := waiting.get(link)):
                    job, taken = next(iter(mine.values())), self._staging.taken
                    advance(job)
                    if job.ref in mine and self._staging.taken != taken:
                        for ref in [r for r in mine if r[:-1] == job.ref[:-1]]:
                            mine[ref] = mine.pop(ref)  # the next slot is for another transfer, which may be short
                    if job.starving:
                        break  # the link's other jobs would get none either

    def overstayers(self, jobs: Iterable[Job]) -> list[Job]:
        """Return the jobs that have held slots for longest, if for too long while consumers wait for their first slots.

        As many are returned as consumers wait. If only consumers wait that have stopped before, one such is returned. The caller
        must have these jobs stopped. No others are returned for a while, which becomes shorter each time until nobody waits.
        """
        now, usage = time.monotonic(), self._staging.usage
        patience = PATIENCE_S / min(1 << self._rounds, IMPATIENCE)
        starved = [
            link
            for link, since in self._starved.items()
            if since <= now - patience and not self._staging.holds(link, "producer")
        ]
        if not starved:
            self._rounds = 0
        if not starved or now - self._gave_up < patience:
            return []
        fresh = sum(not usage.stalled(link) for link in starved)
        found: dict[PartRef, Job] = {}
        for slot, since in self._staging.since.items():
            if since > now - patience or len(found) >= max(fresh, 1):
                break
            if fresh or usage.stalled(slot.owner):
                found |= {job.ref: job for job in jobs if slot in job.slots}
                usage.stall(slot.owner)
        if found:
            self._gave_up, self._rounds = now, self._rounds + 1
        return list(found.values())
