"""SGLang's sender and receiver of one request's KV, over kvxfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender, KVTransferError

from kvxfer import KvxferError
from kvxfer.arguments import describe
from kvxfer.logs import logger
from kvxfer_sglang.notes import AttemptFailed, packed

log = logger("kvxfer.sglang")

MAX_ROOM = (1 << 63) - 1
"""The greatest room that SGLang can write into its metadata: they are unsigned, but torch takes signed numbers only."""


class _Tenant:
    """What senders and receivers share: a room is for one request at a time.

    SGLang keeps the state of a request by its room. If two requests had one room, each would be told what becomes of the
    other, and the pages of both would go into one transfer. So the later one fails, and leaves that state alone.
    """

    clear: Any
    kv_mgr: Any
    bootstrap_room: int
    conclude_state: int | None
    refusal = ""

    def _take_room(self) -> None:
        """Have the room, or fail at once."""
        room = self.bootstrap_room
        if self.kv_mgr.tenants.setdefault(room, self) is not self:
            self.refusal = f"bootstrap_room {room} is that of another request that is under way"
        elif not isinstance(room, int) or not 1 <= room <= MAX_ROOM:  # SGLang's metadata say 0 until they are there
            self.refusal = f"bootstrap_room must be from 1 to {MAX_ROOM}, not {describe(room)}"
        if self.refusal:
            self.conclude_state = KVPoll.Failed

    def _has_room(self) -> bool:
        return self.kv_mgr.tenants.get(self.bootstrap_room) is self

    def _leave_room(self) -> bool:
        """Let another request have the room; return whether this one had it."""
        had = self._has_room()
        if had:
            del self.kv_mgr.tenants[self.bootstrap_room]
        return had

    def failure_exception(self) -> None:
        """Raise SGLang's exception about a request that has failed, and let go of it."""
        if self.refusal:
            self.clear()
            raise KVTransferError(self.bootstrap_room, self.refusal)
        super().failure_exception()  # type: ignore[misc]


class TransferSender(_Tenant, CommonKVSender):
    """One request at prefill, as SGLang's scheduler uses it; for the arguments see ``CommonKVSender``."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._take_room()
        self.kv_mgr.prefill.expect(self.bootstrap_room)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Record how many pages are to be sent, and which row of the metadata is the request's."""
        super().init(num_kv_indices, aux_index)
        self.kv_mgr.prefill.begin(self.bootstrap_room, num_kv_indices)

    def clear(self) -> None:
        """Let go of the request. SGLang reuses its pages from now on."""
        if not self._leave_room():
            return
        room, status = self.bootstrap_room, self.conclude_state or self.kv_mgr.request_status.get(self.bootstrap_room)
        if status == KVPoll.Success:
            self.kv_mgr.prefill.forget(room)
        else:
            self.kv_mgr.prefill.drop(room, self.kv_mgr.failure_records.get(room, "the prefill server let it go"))
        super().clear()

    def abort(self) -> None:
        """Give the request up, unless it is over: another one may have its room."""
        if not self._has_room():
            return
        super().abort()
        self.kv_mgr.prefill.withdraw(self.bootstrap_room, "the request was aborted")


class TransferReceiver(_Tenant, CommonKVReceiver):
    """One request at decode, as SGLang's scheduler uses it; for the arguments see ``CommonKVReceiver``."""

    attempt = 0  # the number of the one that is under way; 0: none yet

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._take_room()

    @property
    def supports_host_destination(self) -> bool:
        """Whether the pages may be those of the host pool: if there is one, whatever the prefill server has."""
        return bool(self.kv_mgr.supports_host_destination)

    def init(self, prefill_dp_rank: int) -> None:
        """Find the prefill ranks, and tell them if the request has been aborted before they were known."""
        aborted = self.conclude_state == KVPoll.Failed and not self.refusal
        if aborted:
            self.conclude_state = None  # SGLang finds no ranks for a request that has failed
        super().init(prefill_dp_rank)
        if aborted:
            self.conclude_state = KVPoll.Failed
            self.ensure_abort_notified()

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        **told: Any,
    ) -> None:
        """Tell the prefill ranks that there are pages for the request's KV."""
        to_host = destination == KVTransferDestination.HOST
        try:
            rows = self.kv_mgr.states.rows(np.asarray(kv_indices).tolist(), state_indices or [])
            self.attempt = self.kv_mgr.decode.expect(
                self.bootstrap_room, rows, aux_index, decode_prefix_len or 0, self._tell_all, to_host
            )
        except KvxferError as error:
            self.kv_mgr.fail(self.bootstrap_room, str(error))
            self.ensure_abort_notified()
            return
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **told)

    def is_abort_release_safe(self) -> bool:
        """Whether nothing writes into the request's pages any more."""
        return bool(self.kv_mgr.is_abort_release_safe(self.bootstrap_room, 0))

    def clear(self) -> None:
        """Let go of the request. SGLang does so twice with one that has failed: the second time, another may have its room."""
        self.kv_mgr.decode.drop(self.bootstrap_room, self.attempt, "the decode server let it go")
        if self._leave_room():
            if KVPoll.Success not in (self.conclude_state, self.kv_mgr.request_status.get(self.bootstrap_room)):
                self.ensure_abort_notified()  # or prefill would wait for a word until its time is over
            super().clear()

    def abort(self) -> None:
        """Give the request up, unless it is over: another one may have its room."""
        if not self._has_room():
            return
        self.kv_mgr.decode.drop(self.bootstrap_room, self.attempt, "the request was aborted")
        super().abort()

    def _tell_all(self, note: AttemptFailed) -> None:
        """Tell all prefill ranks of this request that one of them has given it up; that one is told as well, which does no harm."""
        for rank in self.bootstrap_infos or ():
            try:
                sock, lock = self._connect_to_bootstrap_server(rank)
                with lock:
                    sock.send_multipart(packed(note))
            except zmq.ZMQError as error:
                log.warning("room %s: a prefill rank could not be told that the request is over: %s", note.room, error)

    def _register_kv_args(self) -> bool:
        """Send nothing: SGLang would describe this rank's memory to the prefill ranks here, and kvxfer's directories do that."""
        return self.bootstrap_infos is not None
