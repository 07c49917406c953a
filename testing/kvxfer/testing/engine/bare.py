"""A simulated engine on bare agents."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache
from kvxfer.identity import Handle, Source
from kvxfer.protocol.values import Ended, Event, Released
from kvxfer.testing.engine.defaults import config_of
from kvxfer.testing.engine.memory import PagedMemory


class AgentEngine:
    """An engine on bare agents, one for each rank, and a directory: no scheduler, and no steps.

    Args:
        config: As for ``PagedEngine``.
        memory: As for ``PagedEngine``.
        name: Name of the engine.
        facts: What all its KV depends on.
        caches: The cache of each rank, if other code has their memory; ``()``: those of ``memory``.

    Attributes:
        agents: The agents, by rank.
        directory: By which other engines find it.
        seen: The events so far, by rank.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | None = None,
        memory: PagedMemory | None = None,
        *,
        name: str = "engine",
        facts: Mapping[str, str] | None = None,
        caches: Sequence[Cache] = (),
    ) -> None:
        self.config, self.memory = config_of(config), memory or PagedMemory()
        self.agents = [Agent(cache, self.config, name, facts) for cache in caches or self.memory.caches]
        self.directory = Directory(self.config, name, facts, epoch=self.agents[0].epoch)
        self.directory.publish(tuple(agent.descriptor for agent in self.agents))
        self.seen: dict[int, list[Event]] = {}

    @property
    def source(self) -> Source:
        """Where other engines find it."""
        return self.directory.source

    def events(self, rank: int = 0, timeout: float = 0.0) -> list[Event]:
        """Return all events of a rank so far; wait for a new one for up to ``timeout`` seconds."""
        self.seen.setdefault(rank, []).extend(self.agents[rank].events(timeout))
        return self.seen[rank]

    def wait(self, sort: type, rank: int = 0, count: int = 1, timeout: float = 60.0, **fields: Any) -> list[Any]:
        """Return the events of a sort that have these fields, once there are ``count`` of them.

        Raises:
            AssertionError: They do not come in time.
        """
        end, seen = time.monotonic() + timeout, self.events(rank)
        while time.monotonic() < end:
            of_sort = [e for e in seen if isinstance(e, sort)]
            found = [e for e in of_sort if all(getattr(e, name) == value for name, value in fields.items())]
            if len(found) >= count:
                return found
            seen = self.events(rank, max(0.0, end - time.monotonic()))
        raise AssertionError(f"{count} x {sort.__name__} {fields} did not come within {timeout} s: {self.events(rank)}")

    def over(self, handle: Handle, timeout: float = 60.0, rank: int = 0) -> Ended:
        """Return how a fetch or an offer has ended, once its blocks can be filled again. An offer's handle is its transfer's name."""
        self.wait(Released, rank, timeout=timeout, handle=handle)
        (end,) = self.wait(Ended, rank, handle=handle)
        assert isinstance(end, Ended)
        return end

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
