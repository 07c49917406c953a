"""The engine's calls about one request, each checked once: here. What they do is the parts' work.

This is also the door that a bug of kvxfer's does not leave: what a table refuses ends what one request offers, loads and asks, and that
request is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakMethod

from kvxfer import arguments
from kvxfer.engine.asks import Asks
from kvxfer.engine.loads import Loads
from kvxfer.engine.offers import Offers
from kvxfer.engine.stories import Stories
from kvxfer.errors import ClosedError
from kvxfer.failures import Failure
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import RequestId, Source, TransferId
from kvxfer.logs import logger
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.schedule import EngineRequest, EngineRequests, Load, Prefix, ScheduleError
from kvxfer.text import printable
from kvxfer.ticket import Ticket
from kvxfer.transitions import IllegalTransition
from kvxfer.values import MAX_DIGEST, MAX_REASON, MAX_TOKENS, BlockTable, Rank

log = logger("kvxfer.engine")

F = TypeVar("F", bound=Callable[..., Any])

WHY = "a bug of kvxfer's"


def _guarded(instead: Any) -> Callable[[F], F]:
    """Have a call return ``instead`` if a table refuses what it leads to; its request is given up."""

    def guarded(call: F) -> F:
        @wraps(call)
        def inside(self: RequestCalls, request: str, *given: Any, **named: Any) -> Any:
            with self._door.of(request):
                return call(self, request, *given, **named)
            return instead

        return cast(F, inside)

    return guarded


class RequestCalls:
    """The requests of one engine, as its scheduler tells of them. One thread."""

    def __init__(
        self,
        source: Source,
        tables: TableCheck,
        requests: EngineRequests,
        offers: Offers,
        loads: Loads,
        asks: Asks,
        stories: Stories,
    ) -> None:
        self.source, self._tables, self._requests = source, tables, requests
        self.offers, self.loads, self._asks, self._stories = offers, loads, asks, stories
        self._door, self._breaking = loads.schedule.door, False
        broken = WeakMethod(self._broken)  # any thread that tells of requests knows their schedule
        self._door.broken = lambda owner, bug: None if (found := broken()) is None else found(owner, bug)
        self._descriptors: dict[Rank, RankDescriptor] = {}  # of the ranks that other engines can find
        self._closed = False

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ClosedError(f"this scheduler side has been closed: call {call!r} before that, or make a new one")

    @_guarded(False)
    def offer(
        self,
        request: str,
        transfer: TransferId,
        digest: bytes,
        tokens: int,
        *,
        stops: bool = False,
        answer: str | None = None,
    ) -> bool:
        """Offer the first ``tokens`` tokens of this request's prompt to other engines, as they are computed.

        The offer stands until another engine has fetched it or given it up, or its lease ends. Offered under several answers, it
        has a consumer for each, and one that fails does not affect the others.

        Args:
            request: The engine's id of the request.
            transfer: The name under which consumers fetch it.
            digest: What its KV depends on (``kvxfer.identity.digest``).
            tokens: How many tokens to offer.
            answer: A name for what tells consumers of this offer, if that is one answer for several requests: samples of one prompt.
                None: each request has its own.
            stops: Whether nothing is computed for the request after these tokens. A recurrent state is then offered with the
                step that completes them, and otherwise once the request has finished.

        Returns:
            Whether it is offered. It is not if there is nothing to offer, if the transfer is offered with other content, or if the
            blocks of an earlier request of this name are still held. Requests that offer the same content as the same transfer
            share it: the blocks of one are offered, and another's if that one fails.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: This side has been closed.
            ScheduleError: The request offers another transfer, or another number of tokens.
        """
        _transfer(transfer, digest)
        tokens = _count("tokens", tokens)
        stops = arguments.flag("stops", stops)
        self._check_open("offer")
        name = RequestId(arguments.string("request", request))
        if answer is not None:
            arguments.string("answer", answer)
        with self._requests.of(name) as known:
            arrived = self.offers.schedule.arrive(known, transfer, digest, tokens, stops, answer)
            if arrived and known.offering is not None:
                self.offers.arrived(known.offering)
            return arrived

    def ticket(self, request: str) -> Ticket | None:
        """Return what a consumer of this request's offer must be told; None if it offers nothing, or nothing any more.

        It stays the same when the request has finished, as long as its blocks are held. Hand it on once this side is ``ready``.
        """
        found = self._find(request)
        return None if found is None else self.offers.ticket(found, self.source)

    @_guarded(False)
    def load(
        self,
        request: str,
        transfer: TransferId,
        digest: bytes,
        source: Source,
        tokens: int,
        *,
        begun: bool = True,
        offered: bool = False,
        enough: int = 0,
        answer: str | None = None,
    ) -> bool:
        """Load from another engine what is not cached here of the first ``tokens`` tokens of this request's prompt.

        From now on the producer's lease is renewed. Do not load the last token of a prompt, so that it is computed here.
        Requests of one transfer (samples of one prompt) share it: one loads, the others find the blocks in the prefix cache.

        Args:
            request: The engine's id of the request.
            transfer: The name of the transfer to load.
            digest: What its KV depends on (``kvxfer.identity.digest``).
            source: The directory of the engine that offers it.
            tokens: How many tokens of the prompt are to be here. 0: none, and the producer of what is ``offered`` is told so.
            begun: Whether the producer is assumed to have begun. If not, it is asked, and ``loadable`` returns None until it
                has, for ``start_timeout`` at the most.
            offered: Whether the producer is known to have offered all of the tokens, as when it has answered its request. If
                it does not know them any more, the load then fails within about a second instead of at its deadline.
            enough: The fewest tokens that are of use if the producer gives up before it has computed all (``Update.short``). 0:
                all or none. At most ``tokens``. Only where all groups are ``full``.
            answer: The name of the answer that has told of the transfer, if the producer counts its consumers by answer
                (``offer``). If requests with different answers share a load, the producer is told that it has one consumer less.

        Returns:
            Whether it may load. It may not if the transfer is in use for other content or from another source, or was given
            up just now, or if something is still under way for an earlier request of this name. Then it must be computed here.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: This side has been closed.
            ScheduleError: The request loads another transfer, or other content under that name.
        """
        _transfer(transfer, digest)
        arguments.instance("source", source, Source)
        tokens = _count("tokens", tokens)
        begun, offered = arguments.flag("begun", begun), arguments.flag("offered", offered)
        self._check_open("load")
        name = RequestId(arguments.string("request", request))
        enough = arguments.integer("enough", enough, 0, tokens)
        if answer is not None:
            arguments.string("answer", answer)
        with self._requests.of(name) as known:
            what = known, transfer, digest, source, tokens
            load = self.loads.schedule.arrive(*what, offered, enough, answer, begun)
            if load is not None:
                self.loads.arrived(load)
            return load is not None

    @_guarded(False)
    def ask(
        self, request: str, prefix: Prefix, sources: Sequence[Source], tokens: int, *, computed: int = 0, kind: str = ""
    ) -> bool:
        """Load what other engines hold of the first ``tokens`` tokens of this request's prompt, if that pays.

        All sources are asked when ``loadable`` is first called. It returns None until they have answered, for ``Config.ask_timeout`` at the
        most and for no longer than computing the tokens would take. Then the one is taken from which a load saves most time, and everything
        is as after ``load``. If none has any of it, or no load would end before the tokens were computed, the request is computed here.
        No request fails because of what a source does. A request may be offered as well, with ``offer``.

        Args:
            request: The engine's id of the request.
            prefix: The prompt's tokens and what else its KV depends on.
            sources: The directories of engines that may hold some of it, 16 at most. With the epoch 0 it is whichever engine is there.
                This engine itself is left out.
            tokens: How many tokens of the prompt are to be here: without the last one, if that is to be computed. At most those of
                ``prefix``.
            computed: The tokens that the request will find in the local prefix cache, as far as is known.
            kind: Who has named the sources, for the counts (``asked``): a router's schema, say.

        Returns:
            Whether anybody is asked. Nobody is if the setting ``ask`` is ``never``, if fewer than ``ask_tokens`` tokens are to come, if
            no other source is left, or if the request loads something already.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: This side has been closed.
            ScheduleError: The request has asked for something else, or other engines.
        """
        arguments.instance("prefix", prefix, Prefix)
        sources = arguments.sequence_of("sources", sources, Source)
        tokens = arguments.integer("tokens", tokens, 0, len(prefix))
        arguments.string("kind", kind, empty=True)
        self._check_open("ask")
        name, computed = RequestId(arguments.string("request", request)), _count("computed", computed)
        with self._requests.of(name) as known:
            return self._asks.ask(known, prefix, sources, tokens, computed, kind)

    def asking(self, request: str) -> bool:
        """Return whether other engines have been asked for this request, and it is not decided yet what it loads."""
        found = self._find(request)
        return found is not None and found.asking

    def takes_no_part(self, request: str, why: str) -> None:
        """Record why a request that was to load or to offer does not, in words for `kvxfer why`; changes nothing else."""
        arguments.instance("request", request, str)
        self._stories.takes_no_part(request, arguments.string("why", why, MAX_REASON))

    @_guarded(None)
    def prefetch(self, request: str, computed: int) -> None:
        """Begin a short load before the request has blocks, so that it may run in the step that admits it.

        Call it when the request has arrived, before its local blocks are looked up: unused ones may be lent to the load.
        ``loadable`` calls it as well if nothing is local. It does nothing for a load that is not short (``Config.step_budget``).

        Args:
            request: The engine's id of the request.
            computed: The tokens that the request will find in the local prefix cache, as far as is known.
        """
        load, computed = self._load(request), _count("computed", computed)
        if load is not None:
            self.loads.prefetch(load, computed)

    @_guarded(0)
    def loadable(self, request: str, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` local ones can come from outside.

        It may be asked as often as the engine likes.

        Returns:
            The number of tokens. 0: none can, now or later. None: not known yet, because another request of the same transfer is
            loading them, a prefetch is on its way, or the producer has not begun; ask again in the next step.
        """
        found, computed = self._find(request), _count("computed", computed)
        if found is None:
            return 0
        if self._asks.advance(found, computed):
            return None
        return 0 if found.own_load is None else self.loads.loadable(found.own_load, computed)

    def failure(self, request: str) -> Failure | None:
        """Return why nothing is loaded for a request, if its load was given up or has failed before the request had blocks."""
        load = self._load(request)
        return None if load is None else load.failure

    def is_prefetched(self, request: str) -> bool:
        """Return whether the tokens that ``loadable`` promised are already here, in prefetched blocks.

        If so, the request runs in this step, whose workers first copy the blocks. If not, its load begins with this step.
        """
        load = self._load(request)
        return load is not None and load.is_sync

    def allocated(self, request: str, table: BlockTable, external: int) -> None:
        """Record that the engine admits the request, and counts on ``external`` tokens from outside.

        If ``external`` is not 0, the load begins with the next ``step()``, and a ``report`` tells its end; until then the
        request must not run and its blocks must not be freed, unless ``is_prefetched``. If it is 0, a transfer
        that has not begun is given up.

        Args:
            request: The engine's id of the request.
            table: The whole block table. Blocks of local tokens are not touched.
            external: What ``loadable`` last returned, or less if all groups are ``full``.

        Raises:
            ScheduleError: ``external`` is more than ``loadable`` would return, or the table has no blocks for it, or one of those
                is offered or being filled. The load has failed: no tokens will come.
            ArgumentError: The block table does not fit this engine's groups. The load has failed as well.
        """
        found, external = self._find(request), _count("external", external)
        with self._door.of(request):
            if found is not None:
                self._asks.admitted(found, external)
            if found is not None and found.own_load is not None:
                self.loads.allocated(found.own_load, table, external)
            elif external:
                raise ScheduleError(
                    f"request {request} expects {external} tokens, and does not load: call 'load' first"
                )
            return
        if external:
            raise ScheduleError(f"request {request} cannot be loaded, because of {WHY}")

    def follows(self, request: str) -> bool:
        """Return whether ``runs`` or ``preempted`` matters for what this request offers; if not, its block table need not be looked up."""
        found = self._requests.find(RequestId(request))  # asked for each request of a step
        return found is not None and self.offers.follows(found)

    @_guarded(None)
    def runs(self, request: str, computed: int, scheduled: int, table: BlockTable) -> None:
        """Record that the request runs in this step.

        Args:
            request: The engine's id of the request.
            computed: Tokens computed before this step, prefix-cache hits and loads included.
            scheduled: Tokens that this step computes.
            table: The whole block table as this step uses it; never an increment.

        Raises:
            ArgumentError: The block table does not fit this engine's groups, or has too few blocks for what the step computes.
            ScheduleError: The request offers what the step computes, and a load, such as its own, still fills one of the blocks.
        """
        found, computed, scheduled = self._find(request), _count("computed", computed), _count("scheduled", scheduled)
        if found is not None:
            self.offers.runs(found, computed, scheduled, table)

    @_guarded(None)
    def preempted(self, request: str) -> None:
        """Record that the engine takes the request's blocks away. Call it before the ``runs`` calls of the same step."""
        found = self._find(request)
        if found is not None and found.own_load is not None:
            self.loads.preempted(found.own_load)
        if found is not None:
            self.offers.preempted(found)

    def finished(self, request: str, table: BlockTable, complete: bool, *, good: bool = False) -> bool:
        """Record that the request is over, at whatever point.

        Args:
            request: The engine's id of the request.
            table: The whole block table at its end; one with empty rows if it has no blocks.
            complete: Whether it ended normally and its KV is good; False after an abort or an error.
            good: Whether what has been computed is good although the request is not complete, as after an abort. Consumers
                that are reading it may then finish with that, if it is enough for them.

        Returns:
            True if the engine must keep the blocks until a ``report`` names the request as ``free``. Whatever is returned, it
            must keep the blocks of a load under way until a ``report`` names the request as ``loaded`` or ``failed``.

        Raises:
            ArgumentError: The block table does not fit this engine's groups.
        """
        found = self._find(request)
        complete, good = arguments.flag("complete", complete), arguments.flag("good", good)
        self._tables.check("table", table)
        if found is None:
            return False
        with self._door.of(found.name):
            self._asks.forget(found)
        with self._door.of(found.name):
            if found.own_load is not None:
                self.loads.finished(found.own_load)
        held = self.offers.finished(found, table, complete, findable=bool(self._descriptors), good=good)
        self._requests.forget(found)
        return held

    @_guarded(None)
    def freed(self, request: str) -> None:
        """Record that the engine frees the blocks of a held request although no ``report`` has named it as ``free``."""
        found = self._find(request)
        if found is not None and found.offering is not None:
            self.offers.freed(found.offering)

    @_guarded(None)
    def confirm_load_ended(self, request: str) -> None:
        """Record that the engine knows a load to be over on all ranks; does nothing if a ``report`` has said so."""
        found = self._find(request)
        if found is not None and found.load is not None:
            self.loads.confirm_ended(found.load)

    def _broken(self, owner: RequestId | TransferId, bug: IllegalTransition) -> None:
        """Give up what a request loads, asks and offers, because of a bug of kvxfer's; it is computed here.

        ``owner``: the request, or a transfer that no request offers.
        """
        if self._breaking:
            return  # what follows from a bug, which the log has
        if isinstance(owner, TransferId):
            log.error("transfer %s is broken by %s: please report it: %s", printable(owner), WHY, bug, exc_info=bug)
            return
        what = "request %s is computed here, because of %s: please report it: %s"
        log.error(what, printable(owner), WHY, bug, exc_info=bug)
        found = self._requests.find(owner)
        if found is None:
            return
        self._breaking = True
        try:
            with self._door.of(owner):
                self._asks.give_up(found)
            if found.load is not None:
                self.loads.give_up(found.load, WHY)
            self.offers.withdraw(owner, WHY)
        finally:
            self._breaking = False

    def _find(self, request: str) -> EngineRequest | None:
        """Return what is known of a request: nothing of most, for an engine may pass on all that it hears, whatever its length."""
        return self._requests.find(RequestId(arguments.instance("request", request, str)))

    def _load(self, request: str) -> Load | None:
        found = self._find(request)
        return None if found is None else found.own_load


def _transfer(transfer: TransferId, digest: bytes) -> None:
    arguments.instance("transfer", transfer, TransferId)
    arguments.bytes_of("digest", digest, MAX_DIGEST)


def _count(name: str, value: int) -> int:
    return arguments.integer(name, value, 0, MAX_TOKENS)
