"""A connector that lives beside ours in a `MultiConnector`: it keeps every finished request for a while, as one that
offloads to host memory does, and has handshake metadata and statistics of its own."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


class EngineDescriptor(KVConnectorHandshakeMetadata):
    pass


class Meta(KVConnectorMetadata):
    def __init__(self, saved: set[str]) -> None:
        self.saved = saved


class Sibling(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """`patience`: steps for which it keeps a request. `strict`: it raises on metadata of others, as NIXL's does."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.patience, self.strict = int(extra.get("patience", 0)), bool(extra.get("strict"))
        self.saving: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        self.saving = {name: n - 1 for name, n in self.saving.items()}
        saved = {name for name, n in self.saving.items() if n < 0}
        for name in saved:
            del self.saving[name]
        return Meta(saved)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        if self.patience:
            self.saving[request.request_id] = self.patience
        return bool(self.patience), None

    request_finished_all_groups = request_finished

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        if self.strict and not all(isinstance(card, EngineDescriptor) for card in metadata.values()):
            raise ValueError("metadata of another connector")

    def get_handshake_metadata(self) -> EngineDescriptor | None:
        return EngineDescriptor() if self.strict else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], None]:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Meta)
        return meta.saved, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
