"""Real SGLang servers on loopback, and requests to them as a router makes them: the same one to both of a pair, with a room."""

from __future__ import annotations

import itertools
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvxfer_bench.servers import ServerPair
from kvxfer_bench.vllm.streams import streamed
from kvxfer_vllm.demo.servers import Server, ServerError, free_port

HOST = "127.0.0.1"
STOCK = "sglang:"
"""Stands before the name of a transfer back end of SGLang's own, such as ``sglang:nixl``."""
ANSWER_S = 120.0
GENERATE = "/generate"
_NUMBERS = itertools.count()


class SglangServer(Server):
    """One SGLang server with all its processes, started by the constructor and ended by ``stop``; for the arguments see ``Server``."""

    program = "sglang.launch_server"
    usual = ()
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": HOST}


@dataclass(frozen=True)
class SglangPair(ServerPair):
    """A pair; ``bootstrap``: the port of SGLang's bootstrap server, where the decode server finds the other."""

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


def sampling(ids: Sequence[int] | Sequence[Sequence[int]], tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a request that generates tokens greedily behind a prompt or several."""
    settings = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": settings, **more}


def generated(answer: dict[str, Any]) -> list[int]:
    """Return the tokens of an answer.

    Raises:
        ServerError: The request was aborted.
    """
    reason = answer["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ServerError(f"the request was aborted: {reason.get('message')}")
    return [int(token) for token in answer["output_ids"]]


@dataclass
class Asked:
    """One request at both servers.

    Attributes:
        rid: Its name; that at prefill ends in ``-p`` and that at decode in ``-d``.
        prefill: The answer of the prefill server, which a router throws away.
        decode: The answer of the decode server.
    """

    rid: str
    prefill: Future[Any]
    decode: Future[Any]

    def tokens(self) -> list[int]:
        """Return the tokens of the decode server's answer.

        Raises:
            ServerError: There is none.
        """
        return generated(self.decode.result())


def ask_pair(
    threads: ThreadPoolExecutor, pair: SglangPair, ids: Sequence[int] | Sequence[Sequence[int]], tokens: int
) -> Asked:
    """Send a request to both servers at the same time; it needs two of the threads."""
    batch = len(ids) if ids and isinstance(ids[0], Sequence) else 0
    rid = f"kvxfer-{os.getpid()}-{next(_NUMBERS)}"

    def body(end: str) -> dict[str, Any]:
        named = [f"{rid}-{end}-{n}" for n in range(batch)] if batch else f"{rid}-{end}"
        return sampling(ids, tokens, rid=named, **room)

    room = room_of(pair, batch)
    return Asked(
        rid,
        threads.submit(pair.prefill.post, GENERATE, body("p"), ANSWER_S),
        threads.submit(pair.decode.post, GENERATE, body("d"), ANSWER_S),
    )


def abort(server: Server, rid: str) -> None:
    """Have a server abort a request."""
    data = json.dumps({"rid": rid}).encode()
    request = urllib.request.Request(f"{server.url}/abort_request", data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()


def ask_streaming(threads: ThreadPoolExecutor, pair: SglangPair, ids: Sequence[int], tokens: int) -> tuple[float, int]:
    """Send a request to both servers; return the seconds until the decode server's first token, and how many tokens came.

    Raises:
        ServerError: It has no answer.
    """
    body = sampling(ids, tokens, **room_of(pair))
    begun, first, count = time.perf_counter(), 0.0, 0
    threads.submit(pair.prefill.post, GENERATE, body, ANSWER_S)
    for at, said in streamed(pair.decode, GENERATE, body, timeout=ANSWER_S):
        first, count = first or at - begun, len(generated(json.loads(said)))
    return first, count


def room_of(pair: SglangPair, batch: int = 0) -> dict[str, Any]:
    """Return what tells a request of both servers from all others; with `batch`, one for each of its prompts."""
    rooms = [int.from_bytes(os.urandom(7)) or 1 for _ in range(batch or 1)]
    if not batch:
        return {"bootstrap_host": HOST, "bootstrap_port": pair.bootstrap, "bootstrap_room": rooms[0]}
    return {"bootstrap_host": [HOST] * batch, "bootstrap_port": [pair.bootstrap] * batch, "bootstrap_room": rooms}
