"""Move the KV of transformers' continuous batching from one manager to another, directly between their paged caches."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from kvxfer import ArgumentError, Config, Failure, KvxferError, Ticket
from kvxfer.logs import logger
from kvxfer.text import printable
from kvxfer_transformers.identity import model_facts, prompt_digests
from kvxfer_transformers.manager import Hooks, batch_processor, go_on, rename, reserve
from kvxfer_transformers.paged import block_table, described
from kvxfer_transformers.prompts import prompt_ids
from kvxfer_transformers.side import SingleProcess
from kvxfer_transformers.ticket import BatchTicket

__all__ = ["BatchingExchange"]

log = logger("kvxfer.transformers")

MAX_NAME = 200
"""The most characters of a request's name within one of ours."""
MAX_TICKETS = 10_000
"""The most tickets that wait to be asked for; the oldest is forgotten."""
IDLE_S = 0.005
"""How long the manager's idle loop waits for KV before it looks for requests again."""


@dataclass
class _Arrival:
    """A request whose KV comes from elsewhere."""

    state: RequestState
    told: BatchTicket
    digest: bytes
    name: str
    cancelled: bool = False

    @property
    def ids(self) -> list[int]:
        """The prompt, and what the other side has generated."""
        return [*self.state.initial_tokens[: self.told.tokens], *self.told.tail[0]]


class BatchingExchange:
    """Offers prompts that a continuous-batching manager has prefilled, and lets a manager continue prompts of another one.

    Make one for each running manager; it may do both. Blocks of the paged cache are read and written in place. A prompt
    whose KV does not come is prefilled here, with a line in the log. Any thread but the manager's own may call any method.

    Args:
        manager: A running ``ContinuousBatchingManager``, as ``model.continuous_batching_context_manager()`` gives it, without
            asynchronous batching and tensor parallelism.
        config: Settings of kvxfer, by name; see ``kvxfer.Config``.
        name: This engine's name in the logs of other engines.

    Raises:
        UnsupportedCacheError: The manager or its cache is of a kind that is not supported.
        ConfigError: A setting is wrong.
        TransportError: The back end does not work here.
        KvxferError: The manager does not run.
    """

    def __init__(self, manager: Any, config: Mapping[str, Any] | None = None, *, name: str = "transformers") -> None:
        settings = Config.from_mapping({} if config is None else config)
        self._manager, self._model, self._config = manager, manager.model, settings
        self._processor = batch_processor(manager)
        self._paged, self._scheduler = self._processor.cache, self._processor.scheduler
        self._facts = model_facts(self._model, settings)
        self._arrivals: deque[_Arrival] = deque()
        self._loads: dict[str, _Arrival] = {}  # by name, under which they have blocks
        self._prefills: dict[str, str | None] = {}  # requests to be offered, and what else their KV depends on
        self._tickets: dict[str, str] = {}
        self._held: set[str] = set()  # names under which what is offered has blocks
        self._count = 0
        self._closed = False
        self._naming = threading.Lock()
        cache, groups = described(self._paged)
        self._side = SingleProcess(cache, groups, settings, name, self._facts, self._paged)
        self._hooks = Hooks()
        try:
            with manager.pause():
                self._hooks.add(self._processor, "prepare_next_batch", self._before_batch)
                self._hooks.add(self._processor, "has_pending_requests", self._pending)
                self._hooks.add(self._processor.offloading_manager, "offload_requests", self._make_room)
                self._hooks.add(self._scheduler, "finish_request", self._finishing)
                self._hooks.add(self._scheduler, "set_request_cancellation", self._cancelling)
                self._hooks.add(self._paged, "free_all_requests", self._dropping)
        except BaseException:
            self._side.close()
            raise

    def __enter__(self) -> BatchingExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the caller's threads --------------------------------------------------------------------------------------

    def add_prefill(self, input_ids: Sequence[int], request_id: str | None = None, *, salt: str | None = None) -> str:
        """Have the manager prefill a prompt and generate its first token, and offer its KV.

        The manager returns its result like any other; from then on ``ticket`` returns its ticket.

        Args:
            input_ids: The prompt.
            request_id: The request's name; by default one is made up.
            salt: Whatever else the KV depends on, such as an adapter that is not part of the model.

        Returns:
            The request's name.

        Raises:
            ArgumentError: ``input_ids`` is not a prompt, or ``request_id`` is that of a request that is under way.
            KvxferError: The manager takes no more requests.
        """
        ids = prompt_ids(input_ids)
        with self._naming:
            name = self._unused("prefill", request_id)
            self._prefills[name] = salt
        if self._manager.add_request(ids, request_id=name, max_new_tokens=1) is None:
            del self._prefills[name]
            raise KvxferError("the manager takes no requests any more")
        return name

    def ticket(self, request_id: str) -> str:
        """Return the ticket of a request whose result has come. May be called once for each, and used for one ``add_fetch``.

        Of those that nobody asks for, the last ``MAX_TICKETS`` are kept. What a ticket names is offered for ``lease`` seconds.

        Raises:
            ArgumentError: No such request was prefilled successfully, or too many have been since.
        """
        with self._naming:
            found = self._tickets.pop(request_id, None)
        if found is None:
            raise ArgumentError(
                f"request_id must name a prefill whose result has come without an error, not {request_id!r}"
            )
        return found

    def add_fetch(
        self,
        ticket: str,
        input_ids: Sequence[int],
        request_id: str | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | list[int] | None = None,
        streaming: bool = False,
        salt: str | None = None,
    ) -> str:
        """Add a request that continues with the KV that a ticket names. The manager returns its result like any other.

        Args:
            ticket: What ``ticket`` returned in the other process, or ``CacheExchange.offer`` for a batch of one row.
            input_ids: The same prompt as on the other side.
            request_id: The request's name; by default one is made up.
            max_new_tokens: As for the manager's ``add_request``. Tokens generated by the other side count.
            eos_token_id: As for the manager's ``add_request``.
            streaming: As for the manager's ``add_request``.
            salt: The same as on the other side.

        Returns:
            The request's name.

        Raises:
            ArgumentError: ``ticket`` is not a ticket, or not one for this prompt, or ``request_id`` is that of a request that is
                under way.
            KvxferError: The exchange is closed, or the manager has stopped.
        """
        told, ids = BatchTicket.read(ticket), prompt_ids(input_ids)
        if len(told.rows) != 1 or told.rows[0] is None or not told.tail[0]:
            raise ArgumentError("ticket must be of a single prompt of at least two tokens")
        behind = ids[told.tokens :]
        if len(ids) < told.tokens or behind != list(told.tail[0][: len(behind)]):
            raise ArgumentError(f"input_ids must be the ticket's prompt, with {told.tokens} tokens at the least")
        generation = self._manager.generation_config
        [digest] = prompt_digests(self._model, self._facts, [ids[: told.tokens]], salt)
        if self._closed or not self._manager.is_running():
            raise KvxferError("the exchange is closed" if self._closed else "the manager has stopped")
        with self._naming:
            state = RequestState(
                request_id=self._unused("fetch", request_id),
                initial_tokens=ids,
                max_new_tokens=generation.max_new_tokens if max_new_tokens is None else max_new_tokens,
                eos_token_id=generation.eos_token_id if eos_token_id is None else eos_token_id,
                streaming=streaming,
            )
            self._arrivals.append(_Arrival(state, told, digest, self._name("load", state.request_id)))
        self._manager._wake_up_loop.set()
        return str(state.request_id)

    @property
    def received(self) -> int:
        """The number of bytes fetched so far."""
        return self._side.received

    def close(self) -> None:
        """Give up all offers; requests that are being fetched are prefilled here. May be called more than once."""
        if self._closed:
            return
        with self._manager.pause() if self._manager.is_running() else nullcontext():
            self._end()

    # --- the manager's thread --------------------------------------------------------------------------------------

    def _before_batch(self, original: Callable[[], bool]) -> bool:
        self._turn()
        for _ in range(len(self._arrivals)):
            if not self._admit(self._arrivals[0]):
                break
            self._arrivals.popleft()
        if self._loads:
            self._turn()
            if not self._scheduler.has_pending_requests():
                select.select([self._side.worker], [], [], IDLE_S)
                self._turn()
                self._manager._wake_up_loop.set()  # the loop need not sleep
        return original()

    def _pending(self, original: Callable[[], bool]) -> bool:
        return original() or bool(self._arrivals or self._loads)

    def _make_room(self, original: Callable[[], bool]) -> bool:
        """Take back offers, or wait for loads, if the manager would have to give up otherwise."""
        if original():
            return True
        if self._held:
            log.warning(
                "taking back %d offers unread: the paged cache has no room for running requests", len(self._held)
            )
            self._release(self._held)
            return True
        count = len(self._loads)
        self._wait(lambda: len(self._loads) == count > 0)
        return len(self._loads) < count

    def _finishing(self, original: Callable[[str], None], request_id: str) -> None:
        state = self._scheduler.active_requests.get(request_id)
        allocators = self._paged.cache_allocators.values()
        has_blocks = all(request_id in allocator.block_table for allocator in allocators)
        if request_id in self._prefills and state is not None and state.status == RequestStatus.FINISHED and has_blocks:
            try:
                self._offer(request_id, state)
            except Exception:
                log.exception("request %s could not be offered", request_id)
        if state is not None and state.status >= RequestStatus.FINISHED and has_blocks:
            self._prefills.pop(request_id, None)
        original(request_id)

    def _cancelling(self, original: Callable[[str], None], request_id: str) -> None:
        self._prefills.pop(request_id, None)
        for arrival in [*self._arrivals, *self._loads.values()]:
            if arrival.state.request_id == request_id:
                arrival.cancelled = True
                self._side.scheduler.preempted(arrival.name)
        original(request_id)

    def _dropping(self, original: Callable[[], None], *arguments: Any, **named: Any) -> None:
        """Stop all reads and writes of the cache before it forgets all requests."""
        self._release(self._held)
        for name in self._loads:
            self._side.scheduler.preempted(name)
        self._wait(lambda: bool(self._loads))
        original(*arguments, **named)

    def _wait(self, while_: Callable[[], bool]) -> None:
        """Make turns while something is so, for no longer than loads may take."""
        until = time.monotonic() + self._config.longest + self._config.peer_timeout
        while while_() and time.monotonic() < until:
            select.select([self._side.worker], [], [], IDLE_S)
            self._turn()

    def _offer(self, request_id: str, state: RequestState) -> None:
        """Offer what a request has in the cache, and keep its blocks under a name of this exchange."""
        ids, tokens = [*state.initial_tokens, *state.generated_tokens], state.position_offset
        if tokens >= len(ids):
            raise KvxferError(f"request {request_id} has KV of {tokens} tokens and {len(ids)} ids")
        name, scheduler = self._name("offer", request_id), self._side.scheduler
        table = block_table(self._paged, request_id, tokens)
        [digest] = prompt_digests(self._model, self._facts, [ids[:tokens]], self._prefills[request_id])
        scheduler.offer(name, self._side.mint(), digest, tokens)
        ticket: Ticket | None = scheduler.ticket(name)
        scheduler.runs(name, 0, tokens, table)
        if not scheduler.finished(name, table, complete=True):
            raise KvxferError(f"request {request_id} cannot be kept")
        rename(self._paged, request_id, name)
        self._held.add(name)
        with self._naming:
            self._tickets.pop(request_id, None)  # of an earlier request of that name
            self._tickets[request_id] = BatchTicket((ticket,), tokens, (tuple(ids[tokens:]),)).text
            if len(self._tickets) > MAX_TICKETS:
                del self._tickets[next(iter(self._tickets))]
        self._turn()

    def _admit(self, arrival: _Arrival) -> bool:
        """Give an arrival blocks and begin its load; False if it has to wait for room."""
        scheduler, told, name = self._side.scheduler, arrival.told, arrival.name
        if arrival.cancelled:
            scheduler.finished(name, block_table(self._paged, name, 0), complete=False)
            return True
        ticket = told.rows[0]
        assert ticket is not None
        if not scheduler.load(name, ticket.transfer, arrival.digest, ticket.source, told.tokens, offered=True):
            self._prefill_here(arrival, "its ticket has been used already")
            return True
        computed = self._paged.search_prefix_match(name, arrival.ids[: told.tokens + 1])
        if not reserve(self._paged, name, computed, told.tokens):
            self._paged.free_blocks(name)
            if self._scheduler.has_pending_requests() or self._loads:
                return False
            scheduler.finished(name, block_table(self._paged, name, 0), complete=False)
            self._prefill_here(arrival, "there is no room for it at once")
            return True
        table = block_table(self._paged, name, told.tokens)
        external = scheduler.loadable(name, computed) or 0  # None while another request loads it
        if computed + external < told.tokens:
            self._paged.free_blocks(name, no_cache=True)
            scheduler.finished(name, table, complete=False)
            self._prefill_here(arrival, "another request is fetching it, and each ticket serves one")
            return True
        self._loads[name] = arrival
        scheduler.allocated(name, table, external)
        if not external:
            self._over(name, None)
        return True

    def _turn(self) -> None:
        if self._closed:
            return
        update = self._side.turn()
        for name in update.free:
            self._held.discard(name)
            self._paged.free_blocks(name)
        for name in [*update.loaded, *update.failed]:
            self._over(name, update.failed.get(name))

    def _over(self, name: str, failure: Failure | None) -> None:
        """Let a request run once its load is over."""
        arrival = self._loads.pop(name)
        self._side.scheduler.finished(name, block_table(self._paged, name, arrival.told.tokens), complete=False)
        if arrival.cancelled or failure is not None:
            self._paged.free_blocks(name, no_cache=True)
            if not arrival.cancelled:
                self._prefill_here(arrival, str(failure))
            return
        rename(self._paged, name, arrival.state.request_id)
        go_on(self._processor, arrival.state, arrival.ids, arrival.told.tokens)

    def _prefill_here(self, arrival: _Arrival, why: str) -> None:
        log.warning("request %s is prefilled here: %s", arrival.state.request_id, why)
        self._scheduler.add_waiting_request(arrival.state)

    def _release(self, names: set[str]) -> None:
        """Take back offers, and free their blocks."""
        taken = sorted(names)
        for name in taken:
            self._side.scheduler.freed(name)
        self._turn()  # revoke them, so that no reader trusts them any more
        for name in taken:
            if name in self._held:
                self._held.discard(name)
                self._paged.free_blocks(name)

    def _end(self) -> None:
        """Close, while the manager's loop is stopped."""
        self._hooks.remove()
        self._closed = True
        quiet = self._side.close()
        for name in self._held if quiet else ():
            self._paged.free_blocks(name)
        for name in self._loads if quiet else ():
            self._paged.free_blocks(name, no_cache=True)
        for arrival in [*self._loads.values(), *self._arrivals]:
            if not arrival.cancelled:
                self._prefill_here(arrival, "the exchange was closed")
        for table in (self._held, self._loads, self._arrivals):
            table.clear()

    def _unused(self, what: str, name: str | None) -> str:
        """Return a request's name, or make one up: the manager keeps blocks by name, so that no two requests may have one."""
        if name is None:
            return self._name(what)
        fetched = [arrival.state.request_id for arrival in [*self._arrivals, *self._loads.values()]]
        if name in {*fetched, *self._prefills, *self._scheduler.active_requests, *self._scheduler.waiting_requests}:
            raise ArgumentError(f"request_id must be one that no request under way has, not {name!r}")
        return name

    def _name(self, what: str, request_id: str = "") -> str:
        """Return a name that none has had, by which `kvxfer why` finds the request."""
        self._count += 1
        return f"kvxfer-{what}-{self._count}" + (f" of {printable(request_id)[:MAX_NAME]}" if request_id else "")
