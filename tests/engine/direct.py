"""Side channels that are played: what is sent is there at once, and a test says what goes wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvxfer.engine.side_channel import ChannelAddress, DirectFetches, RankResult, Results, Take
from kvxfer.values import Rank


@dataclass(eq=False)
class Switchboard:
    """The channels of all engines of a test.

    waited: called when a scheduler side waits for results: what happens in that time.
    deaf, mute: nothing comes through to workers, or from them.
    waits, said: for how long scheduler sides have waited, and what has come from workers.
    late: what comes with the next word of a worker, though it is old.
    """

    waited: Callable[[], None] = lambda: None
    deaf: bool = False
    mute: bool = False
    ends: dict[str, WorkerEnd] = field(default_factory=dict)
    names: Any = field(default_factory=itertools.count)
    waits: list[float] = field(default_factory=list)
    said: list[RankResult] = field(default_factory=list)
    late: list[RankResult] = field(default_factory=list)

    def worker(self, take: Take, results: Results) -> Any:
        name = f"end {next(self.names)}"
        self.ends[name] = WorkerEnd(take, results, ChannelAddress(name, b"secret"))
        return self.ends[name]

    def scheduler(self) -> Any:
        return SchedulerEnd(self)


@dataclass(eq=False)
class WorkerEnd:
    take: Take
    results: Results
    address: ChannelAddress

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class SchedulerEnd:
    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._workers: list[WorkerEnd] = []

    def connect(self, addresses: Mapping[Rank, ChannelAddress]) -> None:
        self._workers = [self._board.ends[a.name] for a in addresses.values()]

    @property
    def open(self) -> bool:
        return bool(self._workers)

    def send(self, fetches: DirectFetches) -> bool:
        for worker in () if self._board.deaf else self._workers:
            worker.take(fetches)
        return not self._board.deaf

    def receive(self, timeout: float = 0.0) -> list[RankResult]:
        self._board.waits.append(timeout)
        if timeout:
            self._board.waited()
        found = [result for worker in self._workers for result in worker.results()]
        late, self._board.late = self._board.late, []
        if self._board.mute:
            return []
        self._board.said += found
        return late + found

    def close(self) -> None:
        self._workers = []
