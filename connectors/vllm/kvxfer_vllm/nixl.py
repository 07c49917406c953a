"""kvxfer under the name ``NixlConnector``, for stacks that accept a fixed list of connector names. Never the default.

Set ``"kv_connector": "NixlConnector", "kv_connector_module_path": "kvxfer_vllm.nixl"``: the path takes precedence over vLLM's own
connector of that name. Both engines must do so: the protocol is kvxfer's, which NIXL's own connector does not speak.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvxfer.logs import logger
from kvxfer_vllm import compat
from kvxfer_vllm.connector import KVXferConnector
from kvxfer_vllm.stats import KVXferStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["NixlConnector"]

log = logger("kvxfer.vllm")

_WITHOUT_MEANING = {
    "backends": "names backends of NIXL's; set kvxfer's 'backend' and 'backend_options'",
    "num_threads": "is an option of NIXL's; set 'backend_options'",
    "enforce_handshake_compat": "has no counterpart: engines that do not fit always refuse each other",
    "engine_ttl": "has no counterpart: links end with their peers",
    "decoder_kv_blocks_ttl": "has no counterpart: nothing is held for a next turn, whose KV stays in the prefix cache while there is room",
    "push_registration_timeout": "has no counterpart: consumers fetch",
}


class NixlConnector(KVXferConnector):
    """kvxfer, whatever the name says."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        log.warning(
            "this NixlConnector is kvxfer under that name, as kv_connector_module_path says; its peers must be kvxfer, too"
        )
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def _translate(cls, extra: Mapping[str, Any], transfer: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return kvxfer's settings, and notes on what was NIXL's."""
        settings = {key: value for key, value in extra.items() if key not in _WITHOUT_MEANING}
        notes = [f"setting {key!r} of NixlConnector {why}" for key, why in _WITHOUT_MEANING.items() if key in extra]
        lease = settings.pop("kv_lease_duration", None)
        if lease is not None:
            settings.setdefault("lease", lease)
            notes.append("setting 'kv_lease_duration' of NixlConnector is 'lease' in kvxfer")
        if "bidirectional_kv_xfer" in settings:
            settings.setdefault("decode_answers", settings.pop("bidirectional_kv_xfer"))
            notes.append(
                "setting 'bidirectional_kv_xfer' of NixlConnector is 'decode_answers' in kvxfer, which is on by default"
            )
        threshold = settings.pop("kv_recompute_threshold", None)
        if threshold is not None:
            settings.setdefault("ask_tokens", threshold or 1)
            notes.append("setting 'kv_recompute_threshold' of NixlConnector is 'ask_tokens' in kvxfer")
        return settings, tuple(notes)

    def get_kv_connector_stats(self) -> KVXferStats | None:
        """Return None inside another connector, where vLLM's own class of this name would be used to read them."""
        return super().get_kv_connector_stats() if compat.stands_alone(self) else None
