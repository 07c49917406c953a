"""Which jobs wait for a slot of staging memory, whose turn it is when one is free, and who gives one up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvxfer.data.jobs import Job
from kvxfer.data.staging import Staging
from kvxfer.protocol.values import LinkId, PartRef, Role

__all__ = ["PATIENCE_S", "SlotQueue"]

PATIENCE_S = 1.0
"""For how long a consumer may hold a slot while another has waited for its first one for as long. A piece is on its way for
milliseconds; then it waits for a consumer that has stopped."""


class SlotQueue:
    """Jobs that wait for a slot, by our role and their link. Used by the data thread only."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._waiting: dict[Role, dict[LinkId, dict[PartRef, Job]]] = {"producer": {}, "consumer": {}}
        self._starved: dict[LinkId, float] = {}  # since when a producer's link has none and wants one
        self._gave_up = 0.0  # when somebody lost one for that

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def waits(self, role: Role) -> bool:
        """Return whether a job of ours in this role waits."""
        return bool(self._waiting[role])

    def add(self, job: Job) -> None:
        """Have a job wait, behind those of its link that do."""
        link, role = job.ref.link, job.ref.role
        self._waiting[role].setdefault(link, {})[job.ref] = job
        if role == "producer" and not self._staging.holds(link, role):
            self._starved.setdefault(link, time.monotonic())
        elif role == "producer":
            self._starved.pop(link, None)

    def remove(self, job: Job) -> None:
        """Let a job wait no more, if it does."""
        waiting = self._waiting[job.ref.role]
        mine = waiting.get(job.ref.link)
        if mine is not None and mine.pop(job.ref, None) is not None and not mine:
            del waiting[job.ref.link]
            if job.ref.role == "producer":
                self._starved.pop(job.ref.link, None)

    def feed(self, advance: Callable[[Job], None]) -> None:
        """Let jobs have what is free, a producer's in the order in which their consumers have held least.

        ``advance`` lets a job go on, which takes a slot if it can and then waits no more.
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
                        break  # and so would be the link's others

    def overstayer(self, jobs: Iterable[Job]) -> Job | None:
        """Return who has held a slot for longest and too long, where a consumer has long waited for its first one.

        Whoever asks gives it up; nobody else is named for a while after that.
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
