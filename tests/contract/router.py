"""A small router that keeps the contract, with each schema of params that stacks have (see `tests/vllm/test_stacks.py`)."""

from __future__ import annotations

import http.client
import itertools
import json
import select
import socket
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Params = dict[str, Any]

ASKED: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Schema:
    """How a stack shapes params. `to_p` gets a number that is new for each request. `to_d` gets that and P's answer; if `at_once`, P has
    not answered yet. Both get where P's directory is."""

    to_p: Callable[[int, tuple[str, int]], Params]
    to_d: Callable[[int, tuple[str, int], Params], Params]
    at_once: bool = False


SCHEMAS = {
    # vllm-router, vLLM's toy proxy, llm-d's sidecar (nixlv2), KServe, Ray Serve LLM
    "nixl": Schema(lambda i, at: ASKED, lambda i, at, said: said),
    # AIBrix and production-stack
    "elsewhere": Schema(lambda i, at: ASKED, lambda i, at, said: {**said, "remote_host": "192.0.2.200"}),
    # Dynamo and SMG
    "dynamo": Schema(lambda i, at: ASKED, lambda i, at, said: {**said, "worker_id": i, "bootstrap": {"room": i}}),
    # llm-d (offloading)
    "offloading": Schema(
        lambda i, at: {"remote_decoder": {"kv_request_id": f"room-{i}"}},
        lambda i, at, said: {
            "remote_prefiller": {"kv_request_id": f"room-{i}", "remote_host": at[0], "remote_port": at[1]}
        },
        at_once=True,
    ),
    # those that send to both at once
    "named": Schema(
        lambda i, at: {"do_remote_decode": True, "transfer_id": f"room-{i}"},
        lambda i, at, said: {
            "do_remote_prefill": True,
            "transfer_id": f"room-{i}",
            "remote_host": at[0],
            "remote_port": at[1],
        },
        at_once=True,
    ),
}


class HungUp(Exception):
    """The client has gone."""


class Router:
    """Serves at `url` until `stop`. `directory`: where P's directory is. `drops`: it keeps from D what P says, until `make_good`."""

    def __init__(
        self,
        prefill: str,
        decode: str,
        schema: Schema,
        directory: tuple[str, int] = ("127.0.0.1", 0),
        *,
        drops: bool = False,
        port: int = 0,
    ) -> None:
        router = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    router._route(self, body)
                except (HungUp, ConnectionError):
                    self.close_connection = True

            def do_GET(self) -> None:
                answer = _send(decode, self.path, None, {}, "GET").getresponse()
                _relay(answer, self)

            def log_message(self, *_: Any) -> None:
                pass

        self._prefill, self._decode, self.schema, self._directory, self._drops = (
            prefill,
            decode,
            schema,
            directory,
            drops,
        )
        self._dropped: list[tuple[str, dict[str, Any], dict[str, str], Params]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _route(self, handler: Any, body: dict[str, Any]) -> None:
        path, client, number = handler.path, handler.connection, next(_numbers)
        headers = {"Content-Type": "application/json"}
        if name := handler.headers.get("X-Request-Id"):
            headers["X-Request-Id"] = name
        short = _of_one_token(path, body)
        to_p = {**short, "kv_transfer_params": self.schema.to_p(number, self._directory)}
        if self.schema.at_once:
            params = self.schema.to_d(number, self._directory, {})
            self._at_once(handler, path, headers, to_p, {**body, "kv_transfer_params": params})
            return
        prefill = _send(self._prefill, path, to_p, headers)
        _await(prefill, client)  # if the client goes, P is hung up on, which ends its request
        answer = prefill.getresponse()
        if answer.status != 200:
            _relay(answer, handler)
            return
        said = json.loads(answer.read()).get("kv_transfer_params")
        prefill.close()
        params = self.schema.to_d(number, self._directory, said) if said and not self._drops else None
        to_d = {**body, "kv_transfer_params": params} if params else body
        rest = {**short, "kv_transfer_params": params}
        if self._drops and said:
            self._dropped.append((path, {**short, "kv_transfer_params": said}, headers, said))
        if _gone(client):
            self._give_up(path, rest, headers, params)
            raise HungUp
        decode = _send(self._decode, path, to_d, headers)
        _await(decode, client)
        answer = decode.getresponse()
        if answer.status >= 400:
            self._give_up(path, rest, headers, params)
        _relay(answer, handler, decode)

    def make_good(self) -> None:
        """Have D take all that was dropped."""
        for dropped in self._dropped:
            self._give_up(*dropped)

    def _give_up(self, path: str, body: dict[str, Any], headers: dict[str, str], params: Params | None) -> None:
        """Have D take what P offers, in a request that D accepts since P has, or P holds it for its lease."""
        if params:
            _send(self._decode, path, body, headers).getresponse().read()

    def _at_once(
        self, handler: Any, path: str, headers: dict[str, str], to_p: dict[str, Any], to_d: dict[str, Any]
    ) -> None:
        prefill, decode = _send(self._prefill, path, to_p, headers), _send(self._decode, path, to_d, headers)
        try:
            _await(decode, handler.connection)
        except HungUp:
            prefill.close()
            raise
        answer = decode.getresponse()
        if answer.status < 400:
            threading.Thread(target=lambda: prefill.getresponse().read(), daemon=True).start()
        else:  # D has not told P, which it may not know yet: hanging up ends the request if it still runs
            first = prefill.getresponse()
            first.read()
            if first.status < 400:
                short = {**_of_one_token(path, to_d), "kv_transfer_params": to_d["kv_transfer_params"]}
                self._give_up(path, short, headers, to_d["kv_transfer_params"])
        _relay(answer, handler, decode)


def _of_one_token(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What P is asked for: the same, not streamed and of one token."""
    short = {key: value for key, value in body.items() if key not in ("stream", "stream_options", "min_tokens")}
    if path.endswith("responses"):
        return {**short, "max_output_tokens": 1}
    if "max_completion_tokens" in short:
        short["max_completion_tokens"] = 1
    return {**short, "max_tokens": 1}


def _send(
    url: str, path: str, body: dict[str, Any] | None, headers: dict[str, str], method: str = "POST"
) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    connection.request(method, path, json.dumps(body).encode() if body is not None else None, headers)
    return connection


def _gone(client: socket.socket) -> bool:
    readable, _, _ = select.select([client], [], [], 0)
    return bool(readable) and not client.recv(1, socket.MSG_PEEK)


def _await(upstream: http.client.HTTPConnection, client: socket.socket) -> None:
    """Wait until an engine answers; if the client goes first, hang up."""
    while True:
        readable, _, _ = select.select([upstream.sock, client], [], [], 120)
        if upstream.sock in readable:
            return
        if client in readable and not client.recv(1, socket.MSG_PEEK):
            upstream.close()
            raise HungUp


def _relay(answer: http.client.HTTPResponse, handler: Any, upstream: http.client.HTTPConnection | None = None) -> None:
    handler.send_response(answer.status)
    handler.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    try:
        while piece := answer.read1(65536):
            handler.wfile.write(piece)
            if upstream is not None and _gone(handler.connection):
                raise HungUp
    finally:
        answer.close()
        if upstream is not None:
            upstream.close()
