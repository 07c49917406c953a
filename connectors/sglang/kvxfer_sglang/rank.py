"""One rank's part of kvxfer: its agent and, on the first rank of an engine, the directory that leads to all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvxfer import Agent, Cache, Config, Directory, Event, Rank, Source
from kvxfer.logs import logger

log = logger("kvxfer.sglang")


class EngineRank:
    """A rank of an engine, where an engine is all ranks that share the attention of their requests, in all pipeline stages.

    Args:
        cache: The rank's pool.
        config: The settings.
        name: The engine's name, for the logs of other engines.
        facts: What all KV of the engine depends on.
        gather: Returns what every rank of the engine has passed to it, in the order of the ranks; all of them call it.
        heard: Called with each event, by ``hear``.
    """

    def __init__(
        self,
        cache: Cache,
        config: Config,
        name: str,
        facts: dict[str, str],
        gather: Callable[[Any], list[Any]],
        heard: Callable[[Event], None],
    ) -> None:
        self._heard, self._hearing = heard, threading.Lock()
        self._woken = threading.Event()  # there are events
        with ExitStack() as opened:
            self.agent = Agent(cache, config, name, facts)
            opened.callback(self.agent.close)
            self.agent.listen(self._woken.set)
            self._directory = Directory(config, name, facts) if cache.rank == Rank() else None
            if self._directory is not None:
                opened.callback(self._directory.close)
            told = gather((self.agent.descriptor, self._directory.source if self._directory else None))
            self.source: Source = next(source for _, source in told if source is not None)
            if self._directory is not None:
                self._directory.publish(tuple(descriptor for descriptor, _ in told))
            opened.pop_all()  # all is well: ``close`` closes them

    def hear(self) -> None:
        """Process what has happened, on the caller's thread: a thread for it would have to wait for SGLang's scheduler."""
        if not self._woken.is_set():
            return
        with self._hearing:  # in their order
            self._woken.clear()
            for event in self.agent.events():
                try:
                    self._heard(event)
                except Exception:
                    log.exception("an event of the agent was ignored, because handling it failed: %s", event)

    def close(self) -> bool:
        """Stop; return whether the pool's memory is quiet (``kvxfer.Agent.close``)."""
        quiet = self.agent.close()
        if self._directory is not None:
            self._directory.close()
        return quiet
