"""The jobs that wait for a slot of staging memory: whose turn it is when one is free, and which job must give one up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvxfer.data.jobs import Job
from kvxfer.data.staging import Staging
from kvxfer.protocol.values import LinkId, PartRef, Role

__all__ = ["PATIENCE_S", "SlotQueue"]

PATIENCE_S = 1.0
"""How long a consumer may hold a slot while another has waited as long for its first one. A piece takes milliseconds, so one that
takes so long waits for a consumer that has stopped."""


class SlotQueue:
    """Jobs that wait for a slot, by role and link. Used by the data thread only."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._waiting: dict[Role, dict[LinkId, dict[PartRef, Job]]] = {"producer": {}, "consumer": {}}
        self._starved: dict[LinkId, float] = {}  # since when a link to a consumer has no slot and wants one
        self._gave_up = 0.0  # when a job last had to give one up for that

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
            for link in sorted(waiting, key=self._staging.spent) if role == "producer" else list(waiting):
                while self._staging.room(role) and (mine := waiting.get(link)):
                    job, taken = next(iter(mine.values())), self._staging.taken
                    advance(job)
                    if job.ref in mine and self._staging.taken != taken:
                        for ref in [r for r in mine if r[:-1] == job.ref[:-1]]:
                            mine[ref] = mine.pop(ref)  # the next slot is for another transfer, which may be short
                    if job.starving:
                        break  # the link's other jobs would get none either

    def overstayer(self, jobs: Iterable[Job]) -> Job | None:
        """Return the job that has held a slot for longest, if for too long while a consumer waits for its first slot.

        The caller must have that job stopped; no other is returned for a while.
        """
        before = time.monotonic() - PATIENCE_S
        starved = any(
            since < before for link, since in self._starved.items() if not self._staging.holds(link, "producer")
        )
        if not starved or self._gave_up > before:
            return None
        for slot, since in self._staging.since.items():
            if since > before:
                return None
            holder = next((job for job in jobs if slot in job.slots), None)
            if holder is not None:
                self._gave_up = before + PATIENCE_S
                return holder
        return None
