"""Pairs of real vLLM servers on the same GPUs, one pair a connector with its settings, so that they are measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer_bench.compared import parsed
from kvxfer_vllm.demo.servers import Server, connector, free_port

STOCK = ("NixlConnector", "NixlPushConnector")
"""Connectors of vLLM's own that are measured beside kvxfer: the decode server reads, or the prefill server writes."""

AtOnce = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]
"""From the ``X-Request-Id`` of a request that goes to both servers at once to the params of the prefill and of the decode server."""


@dataclass(frozen=True)
class ServerPair:
    """Two servers between which KV moves, and one without a connector or None.

    ``at_once``: what a router adds that sends to both at the same time, or None if the connector knows no such requests.
    """

    prefill: Server
    decode: Server
    plain: Server | None
    at_once: AtOnce | None


class Starter:
    """Starts servers of one model; they are added to ``begun``.

    ``gpus``: of the prefill and of the decode server; one for both, or none.
    """

    def __init__(self, model: Path, logs: Path, gpus: Sequence[str], flags: Sequence[str], begun: list[Server]) -> None:
        self._model, self._logs, self._gpus, self._flags, self._begun = model, logs, gpus, flags, begun

    def plain(self) -> Server:
        """Start one without a connector, where decode servers are."""
        return self._start("plain", 1, None)

    def pair(self, compared: str, plain: Server | None) -> ServerPair:
        """Start two with a back end of kvxfer or a connector of vLLM's own, and its settings: ``nixl``, ``nixl:{"staging_bytes": 0}``.

        Raises:
            ConfigError: The settings are no JSON object.
        """
        name, settings = parsed(compared)
        log = f"{name}-{len(self._begun)}"
        if name in STOCK:
            engine, ports = f"prefill-{log}", (free_port(), free_port())
            own = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
            prefill, decode = (
                self._start(
                    f"{log}-{role}",
                    side,
                    {**own, "engine_id": engine if side == 0 else f"decode-{log}"},
                    VLLM_NIXL_SIDE_CHANNEL_PORT=str(ports[side]),
                )
                for side, role in enumerate(("producer", "consumer"))
            )
            return ServerPair(prefill, decode, plain, pushed(engine, ports[0]) if name == STOCK[1] else None)
        port = free_port()
        prefill = self._start(
            f"{log}-producer", 0, connector("kv_producer", {"backend": name, "port": port, **settings})
        )
        decode = self._start(f"{log}-consumer", 1, connector("kv_consumer", {"backend": name, **settings}))
        return ServerPair(prefill, decode, plain, asked(port))

    def _start(self, name: str, side: int, transfer: dict[str, Any] | None, **env: str) -> Server:
        on = {"CUDA_VISIBLE_DEVICES": self._gpus[side % len(self._gpus)]} if self._gpus else {}
        server = Server(name, self._model, self._logs, transfer, self._flags, {**env, **on})
        self._begun.append(server)
        return server


def asked(port: int) -> AtOnce:
    """Return what kvxfer wants: both get the transfer's name, and the decode server the prefill server's address."""

    def params(request: str) -> tuple[dict[str, Any], dict[str, Any]]:
        there = {"remote_host": "127.0.0.1", "remote_port": port}
        return (
            {"do_remote_decode": True, "transfer_id": request},
            {"do_remote_prefill": True, "transfer_id": request, **there},
        )

    return params


def pushed(engine: str, port: int) -> AtOnce:
    """Return what vLLM's push connector wants: the decode server gets the prefill server's name, address and request id."""

    def params(request: str) -> tuple[dict[str, Any], dict[str, Any]]:
        there = {"remote_engine_id": engine, "remote_host": "127.0.0.1", "remote_port": port, "tp_size": 1}
        return {"do_remote_decode": True}, {"do_remote_prefill": True, "remote_request_id": request, **there}

    return params
