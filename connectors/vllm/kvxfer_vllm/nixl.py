"""kvxfer under the name ``NixlConnector``, for stacks that accept a fixed list of connector names. Never the default.

Set ``"kv_connector": "NixlConnector", "kv_connector_module_path": "kvxfer_vllm.nixl"``: the path takes precedence over vLLM's own
connector of that name. Both engines must do so: the protocol is kvxfer's, which NIXL's own connector does not speak.

What is found under the name is a class called ``KVXferConnector``. Inside ``MultiConnector`` vLLM keys statistics by that, and rebuilds
them with whatever it has registered for it: under ``NixlConnector``, by its own connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvxfer.logs import logger
from kvxfer_vllm import NAME
from kvxfer_vllm.connector import KVXferConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logger("kvxfer.vllm")

_WITHOUT_MEANING = {
    "backends": "names backends of NIXL's; set kvxfer's 'backend' and 'backend_options'",
    "num_threads": "is an option of NIXL's; set 'backend_options'",
    "enforce_handshake_compat": "has no counterpart: engines that do not fit always refuse each other",
    "engine_ttl": "has no counterpart: links end with their peers",
    "push_registration_timeout": "has no counterpart: consumers fetch",
}

_RENAMED = {
    "kv_lease_duration": "lease",
    "bidirectional_kv_xfer": "decode_answers",
    "kv_recompute_threshold": "ask_tokens",
    "decoder_kv_blocks_ttl": "keep_answers",
}


class NixlConnector(KVXferConnector):
    """kvxfer, whatever the name says under which it was asked for."""

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
        for theirs, ours in _RENAMED.items():
            value = settings.pop(theirs, None)
            if value is not None:
                settings.setdefault(ours, value)
                notes.append(f"setting {theirs!r} of NixlConnector is {ours!r} in kvxfer")
        if settings.get("ask_tokens") == 0:  # NIXL's word for no threshold
            settings["ask_tokens"] = 1
        return settings, tuple(notes)


NixlConnector.__name__ = NAME
NixlPullConnector = NixlPushConnector = NixlConnector
