"""A simulated engine on bare agents."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.identity import Handle, Source
from kvxfer.protocol.values import Ended, Event, Released
from kvxfer.testing.engine.defaults import config_of, until
from kvxfer.testing.engine.memory import PagedMemory

__all__ = ["AgentEngine"]


class AgentEngine:
    """An engine on bare agents, one for each rank, and a directory: no scheduler, and no steps.

    Args:
        config: As for ``PagedEngine``.
        memory: As for ``PagedEngine``.
        name: Name of the engine.
        facts: What all its KV depends on.

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
    ) -> None:
        self.config, self.memory = config_of(config), memory or PagedMemory()
        self.agents = [Agent(cache, self.config, name, facts) for cache in self.memory.caches]
        self.directory = Directory(self.config, name, facts, epoch=self.agents[0].epoch)
        self.directory.publish(tuple(agent.descriptor for agent in self.agents))
        self.seen: dict[int, list[Event]] = {}

    @property
    def source(self) -> Source:
        """Where other engines find it."""
        return self.directory.source

    def events(self, rank: int = 0) -> list[Event]:
        """Return all events of a rank so far."""
        self.seen.setdefault(rank, []).extend(self.agents[rank].events())
        return self.seen[rank]

    def wait(self, sort: type, rank: int = 0, count: int = 1, timeout: float = 30.0) -> list[Any]:
        """Return the events of a sort, once there are ``count`` of them.

        Raises:
            AssertionError: They do not come in time.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = [e for e in self.events(rank) if isinstance(e, sort)]
            if len(found) >= count:
                return found
            time.sleep(0.002)
        raise AssertionError(f"{count} x {sort.__name__} did not come within {timeout} s: {self.events(rank)}")

    def over(self, handle: Handle, timeout: float = 30.0) -> Ended:
        """Return how a fetch has ended, once its blocks can be filled again."""
        until(lambda: any(isinstance(e, Released) and e.handle == handle for e in self.events()), timeout)
        (end,) = (e for e in self.events() if isinstance(e, Ended) and e.handle == handle)
        return end

    def close(self) -> None:
        """Close the agents and the directory."""
        for agent in self.agents:
            agent.close()
        self.directory.close()
