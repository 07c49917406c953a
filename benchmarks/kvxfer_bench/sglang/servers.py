"""Real SGLang servers on loopback: one that serves alone, and pairs that prefill and decode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer_vllm.demo.servers import Server, free_port

HOST = "127.0.0.1"
STOCK = "sglang:"
"""Stands before the name of a transfer back end of SGLang's own, such as ``sglang:nixl``."""


class SglangServer(Server):
    """One SGLang server with all its processes, started by the constructor and ended by ``stop``; for the arguments see ``Server``."""

    program = "sglang.launch_server"
    usual = ()
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": HOST}


@dataclass(frozen=True)
class SglangPair:
    """A prefill and a decode server.

    Attributes:
        prefill: The one that prefills.
        decode: The one that decodes.
        bootstrap: The port of SGLang's bootstrap server, where the decode server finds the other.
    """

    prefill: Server
    decode: Server
    bootstrap: int


def started_pair(
    name: str,
    start: Callable[[str, str, list[str], dict[str, str]], Server],
    settings: Mapping[str, Any] | None = None,
    flags: Iterable[str] = (),
) -> SglangPair:
    """Start two servers, and return them before they answer.

    Args:
        name: kvxfer's back end, or SGLang's own behind ``sglang:``.
        start: Starts one server; it is told a name, a role (``prefill`` or ``decode``), flags, and environment variables.
        settings: Further settings of kvxfer.
        flags: Further flags of both servers.
    """
    stock = name.removeprefix(STOCK) if name.startswith(STOCK) else None
    env = {} if stock else {"KVXFER_SGLANG": json.dumps({"backend": name, **(settings or {})})}
    bootstrap = free_port()
    common = ["--disaggregation-transfer-backend", stock or "kvxfer", "--disaggregation-bootstrap-port", str(bootstrap)]
    prefill, decode = (
        start(f"{name.replace(':', '-')}-{role}", role, ["--disaggregation-mode", role, *common, *flags], env)
        for role in ("prefill", "decode")
    )
    return SglangPair(prefill, decode, bootstrap)
