"""The decode rank's part: the pages that are to be filled for each request, until nothing writes into them any more."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvxfer import BlockTable, ClosedError, Ended, Event, FailureKind, Fetch, Handle, KvxferError, Released, Ticket
from kvxfer.logs import logger
from kvxfer_sglang.identity import request_digest
from kvxfer_sglang.metadata import set_row
from kvxfer_sglang.notes import AttemptFailed, PagesOffered
from kvxfer_sglang.rank import EngineRank
from kvxfer_sglang.states import tokens_of
from kvxfer_sglang.support import UnsupportedSetupError

log = logger("kvxfer.sglang")


@dataclass
class _Receiving:
    """One attempt to get a request's pages."""

    room: int
    attempt: int
    rows: list[list[int]]
    aux_index: int
    prefix: int
    others: Callable[[AttemptFailed], None]
    rank: EngineRank  # in whose memory the pages are
    wanted: bool = True  # by SGLang, which may let go of it while it is being fetched
    fetching: bool = False  # until nothing writes into the pages any more
    ticket: Ticket | None = None  # once a prefill rank has told it
    digest: bytes = b""  # of the fetch that is under way, or was last
    decided: bool = False  # it is being fetched, or never will be
    given_up: bool = False  # by a prefill rank
    ended: Ended | None = None

    @property
    def handle(self) -> Handle:
        """The name of its fetch."""
        return _handle(self.room, self.attempt)


class DecodeRank:
    """Asks for pages once prefill has told of them. Called by SGLang's scheduler, and by the thread of the manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._rank: EngineRank
        self._host: EngineRank | None = None
        self._lock = threading.Lock()
        self._receivings: dict[Handle, _Receiving] = {}  # those that are wanted, or being fetched

    def start(self, rank: EngineRank, host: EngineRank | None = None) -> None:
        """Begin with this rank, and with another one for pages in the host pool, where there is one."""
        self._rank, self._host = rank, host

    def expect(
        self,
        room: int,
        rows: list[list[int]],
        aux_index: int,
        prefix: int,
        others: Callable[[AttemptFailed], None],
        to_host: bool = False,
    ) -> int:
        """Record where a request's KV and metadata go, before a prefill rank is told of it; return the attempt's number.

        Args:
            room: The request.
            rows: The block table to be filled: the pages behind those that are cached, and the items of each state.
            aux_index: The request's row of metadata.
            prefix: Tokens that are cached.
            others: Tells all prefill ranks that the request is over; called from another thread, when one of them has given it up.
            to_host: Whether the pages are those of the host pool.

        Raises:
            UnsupportedSetupError: There is no host pool.
        """
        rank = self._host if to_host else self._rank
        if rank is None:
            raise UnsupportedSetupError("SGLang has described no host pool, and wants to receive into one")
        attempt = int.from_bytes(os.urandom(6))
        with self._lock:
            for earlier in [one for one in self._receivings.values() if one.room == room]:
                earlier.wanted = False
                self._forget(earlier)
            self._receivings[_handle(room, attempt)] = _Receiving(room, attempt, rows, aux_index, prefix, others, rank)
        return attempt

    def offered(self, note: PagesOffered) -> None:
        """Fetch what a prefill rank offers, or will offer. The other ranks of its engine say the same, and change nothing."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        with self._lock:
            receiving = self._current(note.room, note.attempt)
            if receiving is None or receiving.decided or self._manager.request_status.get(note.room) == KVPoll.Failed:
                return
            receiving.decided = True
            try:
                if note.ticket:
                    receiving.ticket = Ticket.read(note.ticket)
                    self._fetch(receiving, receiving.ticket)
                    self._manager.update_status(note.room, KVPoll.Transferring)
                else:
                    set_row(self._manager.kv_args, receiving.aux_index, note.aux)
                    self._manager.update_status(note.room, KVPoll.Success)
            except KvxferError as error:
                self._manager.fail(note.room, str(error))

    def failed(self, note: AttemptFailed) -> None:
        """Record that a prefill rank has given a request up, and tell the others, because a later stage tells no earlier one."""
        with self._lock:
            receiving = self._current(note.room, note.attempt)
            if receiving is None:
                return
            known, receiving.given_up = receiving.given_up, True
            receiving.decided = True
            self._manager.fail(note.room, f"the prefill server gave it up: {note.reason}")
            self._cancel(receiving, note.reason)
        if not known:
            receiving.others(note)

    def drop(self, room: int, attempt: int, reason: str) -> None:
        """Let go of an attempt. What still writes into its pages is asked to stop; ``quiet`` says when it has."""
        with self._lock:
            receiving = self._current(room, attempt)
            if receiving is not None:
                receiving.wanted = False
                self._cancel(receiving, reason)
                self._forget(receiving)

    def quiet(self, room: int) -> bool:
        """Whether nothing writes into the pages of this room's requests any more."""
        with self._lock:
            return not any(one.fetching and one.room == room for one in self._receivings.values())

    def heard(self, event: Event) -> None:
        """Process an event of a fetch."""
        with self._lock:
            receiving = self._receivings.get(event.handle)
            if receiving is None or not receiving.fetching:
                return
            if isinstance(event, Ended):
                receiving.ended = event
                if receiving.wanted and event.outcome.kind not in (None, FailureKind.DIGEST_DIFFERS):
                    self._manager.fail(receiving.room, str(event.outcome.failure))
            if not isinstance(event, Released):
                return
            receiving.fetching = False
            self._forget(receiving)
            if receiving.wanted and receiving.ended is not None:
                try:
                    self._over(receiving, receiving.ended)
                except KvxferError as error:
                    self._manager.fail(receiving.room, str(error))

    def _over(self, receiving: _Receiving, ended: Ended) -> None:
        """Take what has come, if the weights are those for which it was asked.

        If SGLang has updated them since, prefill may have computed with the new ones, and is asked for that.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        same = receiving.digest == self._digest(receiving)
        if ended.outcome.delivered and same:
            set_row(self._manager.kv_args, receiving.aux_index, ended.payload)
            self._manager.update_status(receiving.room, KVPoll.Success)
        elif ended.outcome.kind is FailureKind.DIGEST_DIFFERS and not same and receiving.ticket is not None:
            self._fetch(receiving, receiving.ticket)
        else:
            reason = ended.outcome.failure or "the weights of the decode server were updated before its KV had come"
            self._manager.fail(receiving.room, str(reason))

    def _current(self, room: int, attempt: int) -> _Receiving | None:
        receiving = self._receivings.get(_handle(room, attempt))
        if receiving is None or not receiving.wanted:
            log.debug("room %s: a note about attempt %s has come too late", room, attempt)
            return None
        return receiving

    def _fetch(self, receiving: _Receiving, ticket: Ticket) -> None:
        """Begin the fetch, with a digest made here, so that the producer notices if requests are mixed up."""
        tokens = tokens_of(len(receiving.rows[0]), self._manager.kv_args.page_size)
        receiving.digest, receiving.ended = self._digest(receiving), None
        table = BlockTable.of(receiving.rows)
        own = receiving.rank.source
        fetch = Fetch(receiving.handle, ticket.transfer, receiving.digest, ticket.source, table, 0, tokens, own)
        receiving.rank.agent.fetch(fetch)
        receiving.fetching = True

    def _digest(self, receiving: _Receiving) -> bytes:
        return request_digest(receiving.room, receiving.prefix, len(receiving.rows[0]), self._manager.weights())

    def _cancel(self, receiving: _Receiving, reason: str) -> None:
        if receiving.fetching and receiving.ended is None:
            with suppress(ClosedError):  # its fetches have ended
                receiving.rank.agent.cancel(receiving.handle, reason)

    def _forget(self, receiving: _Receiving) -> None:
        if not (receiving.wanted or receiving.fetching):
            del self._receivings[receiving.handle]


def _handle(room: int, attempt: int) -> Handle:
    return Handle(f"sglang-{room}-{attempt}")
