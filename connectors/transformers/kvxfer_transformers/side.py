"""A whole engine in one process: its scheduler side, its one worker side, and what passes between them."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer import Agent, Config, Ended
from kvxfer.engine import BlockPins, SchedulerSide, Update, WorkerSide
from kvxfer.geometry import Cache
from kvxfer.identity import TransferId
from kvxfer.values import Group

__all__ = ["SingleProcess"]


class SingleProcess:
    """Both sides of an engine whose scheduler and worker are one thread. One thread at a time.

    ``memory`` owns the cache's memory, which must stay in place until ``close``; it is kept alive until nothing touches it any
    more. ``received`` counts the bytes fetched so far.
    """

    def __init__(
        self, cache: Cache, groups: Sequence[Group], config: Config, name: str, facts: dict[str, str], memory: object
    ) -> None:
        self.scheduler = SchedulerSide(config, name, groups, 1, facts, pins=BlockPins(0))
        try:
            self.worker = WorkerSide(Agent(cache, config, name, facts), on_ended=self._count)
        except BaseException:
            self.scheduler.close()
            raise
        self._minted = self.received = 0
        _in_use[self.worker] = memory
        self.turn()  # from now on other engines can find it

    def mint(self) -> TransferId:
        """Return a name that no transfer has had."""
        self._minted += 1
        return TransferId.mint(self.scheduler.source.epoch, f"transformers-{self._minted}")

    def turn(self) -> Update:
        """Carry out what has been asked for, and return what has ended."""
        step = self.scheduler.step()
        self.worker.begin(step)
        self.worker.load(step)
        self.worker.after_forward(step)
        return self.scheduler.report(self.worker.collect())

    def _count(self, ended: Ended) -> None:
        if ended.role == "consumer" and ended.outcome.delivered:
            self.received += ended.nbytes

    def close(self) -> bool:
        """Stop; return whether all memory is quiet (``kvxfer.Agent.close``)."""
        quiet = self.worker.close()
        self.scheduler.close()
        if quiet:
            _in_use.pop(self.worker, None)
        return quiet


_in_use: dict[WorkerSide, object] = {}
"""Keeps memory alive that agents may still touch after their owner has dropped it."""
