"""A connector that lives beside ours in a `MultiConnector` and *loads*: it keeps the blocks of finished requests, as a store in host
memory does, and brings them back, in step or asynchronously."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tests.vllm.engine import BLOCK, PlayedEngine

CACHES: dict[str, Any] = {}
"""By engine, the memory of its cache, where its workers find it."""
KEPT: dict[str, dict[bytes, Any]] = defaultdict(dict)
"""By engine, what its store has: by the hash of a block."""


def attach(engine: PlayedEngine) -> dict[bytes, Any]:
    """Let the store of an engine reach its cache; return what it keeps."""
    name = str(engine.config.kv_transfer_config.engine_id)  # type: ignore[union-attr]
    CACHES[name] = engine.memory
    return KEPT[name]


class Meta(KVConnectorMetadata):
    """Of a step: by request, pairs of a block and a hash."""

    def __init__(self, loads: dict[str, Any], saves: dict[str, Any]) -> None:
        self.loads, self.saves = loads, saves


class Store(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """`load_async`: whether a request waits asynchronously for what it loads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.name, self.later = str(transfer.engine_id), bool(transfer.kv_connector_extra_config.get("load_async"))
        self.found: dict[str, int] = {}
        self.loads: dict[str, Any] = {}
        self.saves: dict[str, Any] = {}
        self.received: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = num_computed_tokens // BLOCK
        last = first
        hashes = request.block_hashes[: (request.num_tokens - 1) // BLOCK]
        while last < len(hashes) and bytes(hashes[last]) in KEPT[self.name]:
            last += 1
        self.found[request.request_id] = first
        return (last - first) * BLOCK, self.later and last > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self.found[request.request_id]
            of = slice(first, first + num_external_tokens // BLOCK)
            (row,) = blocks.get_block_ids()
            self.loads[request.request_id] = list(zip(row[of], map(bytes, request.block_hashes[of]), strict=True))

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        out = Meta(self.loads, self.saves)
        self.loads, self.saves = {}, {}
        return out

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        full = min(request.num_computed_tokens // BLOCK, len(request.block_hashes))
        pairs = list(zip(block_ids[0][:full], map(bytes, request.block_hashes[:full]), strict=True))
        if not pairs or request.status.name == "FINISHED_ABORTED":
            return False, None
        self.saves[request.request_id] = pairs
        return True, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta: Any = self._get_connector_metadata()
        for name, pairs in meta.loads.items():
            for block, content in pairs:
                CACHES[self.name][block] = KEPT[self.name][content]
            if self.later:
                self.received.add(name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        meta: Any = self._get_connector_metadata()
        for pairs in meta.saves.values():
            for block, content in pairs:
                KEPT[self.name][content] = np.copy(CACHES[self.name][block])
        received, self.received = self.received, set()
        return set(meta.saves), received

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
