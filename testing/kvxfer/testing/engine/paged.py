"""A simulated engine over ``kvxfer.engine``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Self

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.engine import BlockPins, Report, SchedulerSide, Ticket, Update, WorkerSide
from kvxfer.failures import Failure
from kvxfer.identity import RequestId, TransferId
from kvxfer.testing.engine.defaults import FACTS, config_of
from kvxfer.testing.engine.memory import PagedMemory
from kvxfer.values import BlockTable


class PagedEngine:
    """An engine whose steps compute nothing but the KV that ``PagedMemory`` says, over ``kvxfer.engine``.

    Each method leaves the engine as a step of it would. Blocks are taken from a pool, or named by the caller.

    Args:
        config: Its settings, or what differs from those for the in-process back end; ``None``: nothing.
        memory: Its memory; ``None``: one rank.
        facts: What all its KV depends on.
        pins: Keeps blocks from reuse, as ``SchedulerSide`` describes.
        more: Further arguments of each ``WorkerSide``.

    Attributes:
        scheduler: The scheduler side.
        workers: The worker side of each rank.
        tables: Blocks of each request.
        loaded: Requests whose load has come, so far.
        failed: Requests whose load has failed, so far, and why.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | None = None,
        memory: PagedMemory | None = None,
        *,
        name: str = "engine",
        facts: Mapping[str, str] = FACTS,
        pins: BlockPins | None = None,
        **more: Any,
    ) -> None:
        self.config, self.name, self.facts = config_of(config), name, dict(facts)
        self.memory = memory or PagedMemory()
        groups = self.memory.caches[0].groups
        self.scheduler = SchedulerSide(self.config, name, groups, len(self.memory.caches), self.facts, pins=pins)
        self.workers = [WorkerSide(agent, **more) for agent in self.agents()]
        self.tables: dict[str, list[int]] = {}
        self.loaded, self.failed = set[str](), dict[RequestId, Failure]()
        self._free, self._owned = list(range(self.memory.blocks)), set[str]()
        self._waiting: dict[str, tuple[bytes, int, Sequence[int] | None]] = {}
        self._loads: dict[str, tuple[bytes, int]] = {}
        self._found = False

    @property
    def worker(self) -> WorkerSide:
        """The first rank's worker side."""
        return self.workers[0]

    def agents(self) -> list[Agent]:
        """Return new agents over the memory, as for ``WorkerSide.resume``."""
        return [Agent(cache, self.config, self.name, self.facts) for cache in self.memory.caches]

    def step(self, compute: Callable[[int], object] | None = None, timeout: float = 0.005) -> Update:
        """Make a step. The first one says where the agents listen.

        Args:
            compute: Computes a layer, after which the workers are told that it is done; ``None``: they are not.
            timeout: Seconds for which an empty step waits for something to end.
        """
        self._found = True
        for request in list(self._waiting):
            self._admit(request)
        step = self.scheduler.step()
        for worker in self.workers:
            worker.begin(step)
            worker.load(step)
        for layer in range(self.memory.layers if compute else 0):
            compute and compute(layer)
            for worker in self.workers:
                worker.layer_done(step, f"layer.{layer}")
        for worker in self.workers:
            worker.after_forward(step)
        update = self.scheduler.report(reduce(Report.merge, [worker.collect(timeout) for worker in self.workers]))
        for request in update.loaded & self._loads.keys():
            digest, tokens = self._loads.pop(request)
            last = self.tables[request][(tokens - 1) // self.memory.tokens]
            self.memory.accept([last])  # behind the last token a load may leave what the producer has there
            self.memory.expect(digest, self.tables[request], 0, tokens)
        for request in update.failed.keys() & self._loads.keys():
            del self._loads[request]
            self.memory.accept(self.tables[request])
        for request in update.free:
            self._give_back(request)
        self.loaded |= update.loaded
        self.failed |= update.failed
        return update

    def offer(
        self, request: str, tokens: int, blocks: Sequence[int] | None = None, *, chunk: int = 0, **more: Any
    ) -> Ticket:
        """Compute a prompt for another engine, whose digest is the request's name, and finish the request.

        Args:
            request: The request's name.
            tokens: Length of the prompt.
            blocks: Where its KV lies; ``None``: in blocks of the pool.
            chunk: Tokens that a step computes; 0: all of them.
            more: Further arguments of ``SchedulerSide.offer``.

        Returns:
            What the other engine's ``load`` takes.
        """
        ticket = self.ask(request, tokens, **more)
        table = BlockTable.of([self._take(request, tokens, blocks)])
        for start in range(0, tokens, chunk or tokens):
            self.run(request, ticket.digest, start, min(start + (chunk or tokens), tokens))
            self.step()
        assert self.scheduler.finished(request, table, complete=True)
        return ticket

    def ask(self, request: str, tokens: int, **more: Any) -> Ticket:
        """Announce that a prompt will be computed for another engine."""
        self._be_found()
        transfer = TransferId.mint(self.scheduler.source.epoch, request)
        assert self.scheduler.offer(request, transfer, request.encode(), tokens, **more)
        ticket = self.scheduler.ticket(request)
        assert ticket is not None
        return ticket

    def run(self, request: str, digest: bytes, start: int, end: int, blocks: Sequence[int] | None = None) -> None:
        """Compute a prompt's tokens ``[start, end)`` in the step that is to come."""
        row = self._take(request, end, blocks)
        self.memory.compute(digest, row, start, end)
        self.scheduler.runs(request, start, end - start, BlockTable.of([row]))

    def load(self, request: str, ticket: Ticket, tokens: int, blocks: Sequence[int] | None = None, **more: Any) -> None:
        """Load a prompt, as soon as a step can, into blocks that are named or of the pool.

        Args:
            request: The request's name.
            ticket: What the other engine has told.
            tokens: Length of the prompt.
            blocks: Where its KV is to lie; ``None``: in blocks of the pool.
            more: Further arguments of ``SchedulerSide.load``.
        """
        self._be_found()
        assert self.scheduler.load(request, ticket.transfer, ticket.digest, ticket.source, tokens, **more)
        self._waiting[request] = ticket.digest, tokens, blocks
        self._admit(request)

    def finish(self, request: str, complete: bool = True) -> None:
        """End a request; its blocks go back to the pool once nobody may touch them."""
        table = BlockTable.of([self.tables.get(request, [])])
        self._waiting.pop(request, None)
        if not self.scheduler.finished(request, table, complete) and request not in self._loads:
            self._give_back(request)

    def until(self, request: str, timeout: float = 60.0) -> Update:
        """Make steps until one tells something of a request, and return what that one has told.

        Raises:
            AssertionError: None does, within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            update = self.step()
            if request in update.loaded | update.free | update.failed.keys():
                return update
        raise AssertionError(f"nothing came of {request} within {timeout:g} s")

    def verify(self) -> None:
        """Compare every byte of the memory, but for blocks into which something is loaded.

        Raises:
            AssertionError: A byte is wrong.
        """
        self.memory.verify(but=[block for request in self._loads for block in self.tables[request]])

    def close(self) -> None:
        """Close both sides."""
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _be_found(self) -> None:
        if not self._found:
            self.step()

    def _admit(self, request: str) -> None:
        """Give a request its blocks, once it is known what can be loaded."""
        external = self.scheduler.loadable(request, 0)
        if external is not None:
            digest, tokens, blocks = self._waiting.pop(request)
            self.scheduler.allocated(request, BlockTable.of([self._take(request, tokens, blocks)]), external)
            if external:
                self._loads[request] = digest, tokens

    def _take(self, request: str, tokens: int, blocks: Sequence[int] | None) -> list[int]:
        """Return a request's blocks, which it has or gets now."""
        if blocks is not None:
            self.tables[request] = list(blocks)
        row, need = self.tables.setdefault(request, []), -(-tokens // self.memory.tokens)
        if blocks is None and len(row) < need:
            self._owned.add(request)
            # The last that was freed: the worst for late writes.
            row += [self._free.pop() for _ in range(need - len(row))]
        return row

    def _give_back(self, request: str) -> None:
        row = self.tables.pop(request, [])
        if request in self._owned:
            self._owned.discard(request)
            self._free += row
