"""SGLang's sender and receiver of one request's KV, over kvxfer."""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

__all__ = ["TransferReceiver", "TransferSender"]


class TransferSender(CommonKVSender):
    """What a prefill scheduler has of one request."""

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Take in how many pages there will be, and which row of metadata is the request's."""
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
        pages = np.asarray(kv_indices).tolist()
        self._attempt = self.kv_mgr.decode.expect(self.bootstrap_room, pages, aux_index, decode_prefix_len or 0)
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

    def _register_kv_args(self) -> bool:
        """Tell prefill ranks nothing of this rank's memory: kvxfer's directories do."""
        return self.bootstrap_infos is not None
