"""The prefill rank's part: the pages that are offered for each request, until they are fetched or given up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvxfer import (
    BlockTable,
    ClosedError,
    Ended,
    Event,
    Generation,
    Handle,
    KvxferError,
    Offer,
    Released,
    Ticket,
    TransferId,
)
from kvxfer.fence import Fence
from kvxfer.logs import logger
from kvxfer.values import NULL
from kvxfer_sglang.identity import request_digest
from kvxfer_sglang.metadata import row_of
from kvxfer_sglang.notes import AttemptFailed, PagesOffered, PagesWanted
from kvxfer_sglang.rank import EngineRank
from kvxfer_sglang.states import MAMBA, PADDING, tokens_of

log = logger("kvxfer.sglang")

GENERATION = Generation(1)
"""The generation of all offers: SGLang never computes a transfer's pages again under the same name once it has given them up."""

MAX_REMEMBERED = 4096
"""How many requests are remembered that ended before decode had asked for them, and that decode aborted before they were here."""


@dataclass
class _Sending:
    """A request whose pages are offered, or will be; decode is told of it before they are computed."""

    room: int
    transfer: TransferId
    count: int  # of pages that are to be sent
    wanted: tuple[PagesWanted, ...]
    digest: bytes = b""  # once the first pages are computed
    pages: list[int] = field(default_factory=list)
    states: Sequence[Any] | None = None  # SGLang's indices, once all is computed
    ended: Ended | None = None

    @property
    def handle(self) -> Handle:
        """The name of its offer."""
        return _handle(self.room)

    @property
    def staged(self) -> bool:
        """Whether decode has pipeline stages: each of them hears from one stage here alone, which must then send the metadata."""
        return any(note.stages > 1 for note in self.wanted)


@dataclass(frozen=True)
class _Word:
    """Why a request is over of which one side has not heard yet."""

    reason: str
    aborted: bool  # by decode, before the request was here; otherwise dropped here, before decode had asked for it


class PrefillRank:
    """Offers pages as SGLang computes them. Called by SGLang's scheduler, and by the thread of the manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._rank: EngineRank
        self._lock = threading.Lock()
        self._sendings: dict[Handle, _Sending] = {}  # one of each room
        self._words: dict[int, _Word] = {}  # by room, the oldest first
        self._count = 0

    def start(self, rank: EngineRank) -> None:
        self._rank = rank

    def wanted(self, note: PagesWanted) -> None:
        """Record that a decode rank asks for a request; once all of them have, the scheduler goes on with it.

        A rank that asks too late is told so, or it would wait until its time is over.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager = self._manager
        with self._lock:
            status, word = manager.request_status.get(note.room), self._words.get(note.room)
            if word is not None and word.aborted:
                del self._words[note.room]  # that was another request
                word = None
            dropped = word.reason if word is not None and status is None else None
            if dropped is None and status in (None, KVPoll.Bootstrapping):
                known = manager.transfer_infos.setdefault(note.room, {})
                known[note.endpoint, note.dst_port] = note
                if len(known) < note.required_dst_info_num:
                    return
                manager.resolve_kv_replica_factor(known)
                manager.req_to_decode_prefix_len[note.room] = note.prefix
                manager.update_status(note.room, KVPoll.WaitingForInput)
                return
        failed = dropped or "it had failed before"
        reason = "another request has its room" if status not in (None, KVPoll.Failed) else failed
        manager.tell(note.endpoint, note.dst_port, AttemptFailed(note.room, note.attempt, reason))

    def expect(self, room: int) -> None:
        """Record that a request begins, whose room may have been that of another; it fails if decode has aborted it before."""
        with self._lock:
            word = self._words.pop(room, None)
        if word is not None and word.aborted:
            self._manager.fail(room, word.reason)

    def drop(self, room: int, reason: str) -> None:
        """Give a request up, and tell it to decode ranks that ask for it from now on."""
        self.withdraw(room, reason)
        with self._lock:
            self._remember(room, _Word(reason, aborted=False))

    def begin(self, room: int, pages: int) -> None:
        """Name the transfer of a request, of which ``pages`` pages are to be sent, and tell decode of it.

        Decode then asks for the pages while they are computed, and need not be told once they are there. All ranks of an engine
        begin the same requests in the same order, as SGLang itself needs it; so they agree on names.
        """
        with self._lock:
            self._count += 1
            known = tuple(self._manager.transfer_infos.get(room, {}).values())
            transfer = TransferId.mint(self._rank.source.epoch, f"sglang-{room}-{self._count}")
            sending = _Sending(room, transfer, pages, known)
            self._sendings[sending.handle] = sending
            moves, digest = self._moves(sending), self._digest(sending)
        if moves:
            self._tell(sending, ticket=Ticket(transfer, digest, self._rank.source).text)

    def add(
        self,
        room: int,
        pages: Sequence[int],
        last: bool,
        aux_index: int | None,
        after: Fence | None,
        states: Sequence[Any] | None = None,
    ) -> None:
        """Offer further pages of a request, and with the last ones SGLang's metadata of it.

        Args:
            room: The request.
            pages: The pages that follow those added before.
            last: Whether no more follow.
            aux_index: The request's row of metadata, with the last pages.
            after: The fence behind which the pages are complete; ``None`` when they are.
            states: SGLang's indices of each state, with the last pages.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager, failure = self._manager, ""
        with self._lock:
            sending = self._sendings.get(_handle(room))
            if sending is None or manager.request_status.get(room) in (None, KVPoll.Failed):
                return
            sending.pages += pages
            sending.states = (states or []) if last else None
            sampled = last and (manager.last_stage or sending.staged)
            aux = row_of(manager.kv_args, aux_index) if sampled and aux_index is not None else b""
            moves = self._moves(sending)
            if moves:
                try:
                    self._offer(sending, last, aux, after)
                    manager.update_status(room, KVPoll.Transferring)
                except KvxferError as error:
                    failure = str(error)
            else:
                manager.update_status(room, KVPoll.Success)
        if failure:
            manager.fail(room, failure)
            self.withdraw(room, failure)
        elif not moves and sampled:
            self._tell(sending, aux=aux)

    def withdraw(self, room: int, reason: str) -> None:
        """Give up a request's pages, before SGLang uses them for something else, and tell the decode ranks.

        This does no harm if the transfer has ended or has never begun.
        """
        with self._lock:
            sending = self._sendings.pop(_handle(room), None)
            known = sending.wanted if sending else tuple(self._manager.transfer_infos.get(room, {}).values())
            if sending is not None and sending.ended is None:  # decode may ask for what is not offered yet
                with suppress(ClosedError):  # its transfers have ended
                    self._rank.agent.revoke(sending.transfer, GENERATION, reason, gone=True)
        for note in known:
            self._manager.tell(note.endpoint, note.dst_port, AttemptFailed(room, note.attempt, reason))

    def aborted(self, room: int, reason: str = "the decode server aborted it") -> None:
        """Record that a request is aborted, by a decode rank unless the reason says otherwise; it may not be here yet."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        with self._lock:  # SGLang makes a state before `expect` is called
            status = self._manager.request_status.get(room)
            if status is None and room not in self._words:
                self._remember(room, _Word(reason, aborted=True))
        if status not in (None, KVPoll.Success):
            self._manager.fail(room, reason)
            self.withdraw(room, reason)

    def given_up(self, note: AttemptFailed) -> None:
        """Record that another prefill rank has given a request up, as a decode rank tells us."""
        with self._lock:
            sending = self._sendings.get(_handle(note.room))
            known = sending.wanted if sending else tuple(self._manager.transfer_infos.get(note.room, {}).values())
        if any(wanted.attempt == note.attempt for wanted in known):
            self.aborted(note.room, note.reason)

    def forget(self, room: int) -> None:
        """Record that SGLang is done with a request that went well."""
        with self._lock:
            self._sendings.pop(_handle(room), None)

    def heard(self, event: Event) -> None:
        """Process an event of a transfer; SGLang is told how it ended once nothing reads its pages any more."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        with self._lock:
            sending = self._sendings.get(event.handle)
            if sending is None or sending.transfer != event.transfer:
                return  # given up before
            if isinstance(event, Ended):
                sending.ended = event
            if not isinstance(event, Released) or sending.ended is None:
                return
            outcome = sending.ended.outcome
            if outcome.delivered:
                self._manager.update_status(sending.room, KVPoll.Success)
        if not outcome.delivered:
            self._manager.fail(sending.room, str(outcome.failure))

    def _moves(self, sending: _Sending) -> bool:
        """Return whether there is something to move; decode may have all pages."""
        return bool(sending.count or sending.pages) or MAMBA in self._manager.states.kinds

    def _digest(self, sending: _Sending) -> bytes:
        prefix = sending.wanted[0].prefix if sending.wanted else 0
        return request_digest(sending.room, prefix, sending.count, self._manager.weights())

    def _tell(self, sending: _Sending, ticket: str = "", aux: bytes = b"") -> None:
        for note in sending.wanted:
            self._manager.tell(note.endpoint, note.dst_port, PagesOffered(sending.room, note.attempt, ticket, aux))

    def _offer(self, sending: _Sending, last: bool, aux: bytes, after: Fence | None) -> None:
        tokens = tokens_of(len(sending.pages), self._manager.kv_args.page_size)
        rows = self._manager.states.rows(sending.pages, sending.states)
        if not sending.pages:
            rows = [[PADDING], *(row or [NULL] for row in rows[1:])]
        table = BlockTable.of(rows)
        sending.digest = sending.digest or self._digest(sending)  # of the weights now, not of those when it began
        offer = Offer(
            sending.transfer, sending.digest, GENERATION, tokens, table, last, payload=aux, handle=sending.handle
        )
        self._rank.agent.offer(offer, after)

    def _remember(self, room: int, word: _Word) -> None:
        """Keep a word for the side that has not heard it yet, and forget the oldest one if there are too many."""
        self._words[room] = word
        if len(self._words) > MAX_REMEMBERED:
            del self._words[next(iter(self._words))]


def _handle(room: int) -> Handle:
    return Handle(f"room {room}")
