"""SGLang's sender and receiver of one request's KV, over kvxfer."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

from kvxfer import KvxferError
from kvxfer_sglang.notes import AttemptFailed, packed

__all__ = ["TransferReceiver", "TransferSender"]

log = logging.getLogger("kvxfer.sglang")


class TransferSender(CommonKVSender):
    """What a prefill scheduler has of one request."""

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Record how many pages there will be, and which row of metadata is the request's."""
        super().init(num_kv_indices, aux_index)
        self.kv_mgr.prefill.begin(self.bootstrap_room, num_kv_indices)

    def clear(self) -> None:
        """Let go of the request. SGLang reuses its pages from now on."""
        room, status = self.bootstrap_room, self.conclude_state or self.kv_mgr.request_status.get(self.bootstrap_room)
        if status == KVPoll.Success:
            self.kv_mgr.prefill.forget(room)
        else:
            self.kv_mgr.prefill.withdraw(room, self.kv_mgr.failure_records.get(room, "the prefill server let it go"))
        super().clear()

    def abort(self) -> None:
        """Give the request up."""
        super().abort()
        self.kv_mgr.prefill.withdraw(self.bootstrap_room, "the request was aborted")


class TransferReceiver(CommonKVReceiver):
    """What a decode scheduler has of one request."""

    _attempt = 0  # none yet

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **told: Any,
    ) -> None:
        """Tell the prefill ranks that pages are there."""
        try:
            rows = self.kv_mgr.states.rows(np.asarray(kv_indices).tolist(), state_indices or [])
        except KvxferError as error:
            self.kv_mgr.fail(self.bootstrap_room, str(error))
            self.ensure_abort_notified()
            return
        self._attempt = self.kv_mgr.decode.expect(
            self.bootstrap_room, rows, aux_index, decode_prefix_len or 0, self._tell_all
        )
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **told)

    def is_abort_release_safe(self) -> bool:
        """Whether nothing writes into the request's pages any more."""
        return bool(self.kv_mgr.is_abort_release_safe(self.bootstrap_room, 0))

    def clear(self) -> None:
        """Let go of the request."""
        self.kv_mgr.decode.drop(self.bootstrap_room, self._attempt, "the decode server let it go")
        super().clear()

    def abort(self) -> None:
        """Give the request up."""
        self.kv_mgr.decode.drop(self.bootstrap_room, self._attempt, "the request was aborted")
        super().abort()

    def _tell_all(self, note: AttemptFailed) -> None:
        """Tell all prefill ranks of this request that one of them has given it up; who knows is not hurt by it."""
        for rank in self.bootstrap_infos or ():
            try:
                sock, lock = self._connect_to_bootstrap_server(rank)
                with lock:
                    sock.send_multipart(packed(note))
            except zmq.ZMQError as error:
                log.warning("room %s: a prefill rank cannot be told that it is over: %s", note.room, error)

    def _register_kv_args(self) -> bool:
        """Tell prefill ranks nothing of this rank's memory: kvxfer's directories do."""
        return self.bootstrap_infos is not None
