"""kvxfer in Ray Serve LLM, so that Ray sends a request to both sides at once.

If it is registered before the application is built, Ray chooses the prefill replica first and sends the request to it and to
the decode replica's own engine at the same time::

    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

    KVConnectorBackendFactory.register_backend("KVXferConnector", "kvxfer_vllm.ray:KVXferBackend")

Unregistered, Ray waits for the prefill replica's answer and relays it, which works as well. This module imports Ray, and
nothing else of kvxfer imports this module.
"""

from __future__ import annotations

import os
import uuid
from types import SimpleNamespace
from typing import Any

from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    base_prefill_kv_transfer_params,
    clamp_request_to_single_token,
)

from kvxfer.errors import ConfigError
from kvxfer_vllm.migration import ConnectorConfig, defaults, located

HOST, PORT, NAME = "kvxfer_host", "kvxfer_port", "transfer_id"


class KVXferBackend(BaseConnectorBackend):
    """Gives each replica a port of its own, which Ray tells the others, and gives both sides one name for a transfer.

    The prefill side's setting ``port`` is the first replica's; the others' ports follow it, on whichever host they run.
    Decode replicas need no port.
    """

    requires_peer_binding = True
    concurrent_handoff = True

    def setup(self) -> None:
        """Settle this replica's port, before its engine starts.

        Raises:
            ConfigError: The replica may prefill for others, and ``port`` is not set; or a setting is wrong.
        """
        transfer = self.kv_transfer_config
        extra, _ = defaults(transfer.get("kv_connector_extra_config") or {}, os.environ)
        rank = self.llm_config.engine_kwargs.get("data_parallel_rank") or 0
        if extra.get("port"):
            # The number of a data-parallel rank is added where the engine starts.
            extra["port"] += 0 if rank else self._compute_port_offset()
        elif transfer.get("kv_role") != "kv_consumer":
            raise ConfigError(
                "a prefill replica of Ray Serve LLM is found by its port: set 'port' in kv_connector_extra_config to the first of a "
                "range of ports, one for each replica there can be"
            )
        transfer["kv_connector_extra_config"] = extra
        config = located(ConnectorConfig.from_mapping(extra), SimpleNamespace(data_parallel_index=rank))
        self._where = {HOST: config.advertise or config.listen, PORT: config.port}

    def replica_metadata(self) -> dict[str, Any]:
        """Return where this replica's directory is; Ray passes it to the caller that has chosen the replica."""
        return dict(self._where)

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """Return the request for the prefill replica: the prompt, for one token, and the transfer's name.

        The name is new for each request, whatever id the client chose; ``request`` carries it to the decode side.
        """
        name = f"ray-{uuid.uuid4().hex}"
        request.kv_transfer_params = {NAME: name}
        out = request.model_copy(deep=True)
        out.kv_transfer_params = {**base_prefill_kv_transfer_params(), NAME: name}
        clamp_request_to_single_token(out)
        return out

    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any) -> Any:
        """Return the request for this replica's own engine, with the transfer's name and the prefill replica's address."""
        out = request.model_copy(deep=True)
        where = peer or {}
        out.kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            NAME: request.kv_transfer_params[NAME],
            "remote_host": where.get(HOST),
            "remote_port": where.get(PORT),
        }
        return out
