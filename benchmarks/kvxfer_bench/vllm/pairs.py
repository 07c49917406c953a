"""Pairs of real vLLM servers on the same GPUs, one pair a back end, so that back ends are measured in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer_vllm.demo.servers import Server, connector, free_port

STOCK = "NixlConnector"
"""The connector of vLLM's own that is measured beside kvxfer."""


@dataclass(frozen=True)
class ServerPair:
    """Two servers between which KV moves, and one without a connector or None.

    ``address``: where a router that sends to both at once says the prefill server is, or None if the connector knows no such requests.
    """

    prefill: Server
    decode: Server
    plain: Server | None
    address: tuple[str, int] | None


class Starter:
    """Starts servers of one model; they are added to ``begun``.

    ``gpus``: of the prefill and of the decode server; one for both, or none.
    """

    def __init__(self, model: Path, logs: Path, gpus: Sequence[str], flags: Sequence[str], begun: list[Server]) -> None:
        self._model, self._logs, self._gpus, self._flags, self._begun = model, logs, gpus, flags, begun

    def plain(self) -> Server:
        """Start one without a connector, where decode servers are."""
        return self._start("plain", 1, None)

    def pair(self, name: str, plain: Server | None) -> ServerPair:
        """Start two that move KV by back end ``name``, or by vLLM's own connector."""
        if name == STOCK:
            transfer = {"kv_connector": STOCK, "kv_role": "kv_both"}
            prefill, decode = (
                self._start(f"{name}-{role}", side, transfer, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))
                for side, role in enumerate(("producer", "consumer"))
            )
            return ServerPair(prefill, decode, plain, None)
        port = free_port()
        prefill = self._start(f"{name}-producer", 0, connector("kv_producer", {"backend": name, "port": port}))
        decode = self._start(f"{name}-consumer", 1, connector("kv_consumer", {"backend": name}))
        return ServerPair(prefill, decode, plain, ("127.0.0.1", port))

    def _start(self, name: str, side: int, transfer: dict[str, Any] | None, **env: str) -> Server:
        on = {"CUDA_VISIBLE_DEVICES": self._gpus[side % len(self._gpus)]} if self._gpus else {}
        server = Server(name, self._model, self._logs, transfer, self._flags, {**env, **on})
        self._begun.append(server)
        return server
