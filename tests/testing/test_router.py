"""`kvxfer conformance --router`: what it finds in routers that break the contract, and what its exit codes mean. On played engines."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import build
from tests.contract.router import SCHEMAS, Router

CLOSED = "http://127.0.0.1:9"


class CompletionServer:
    """A server of completions as far as the tests go. A decode engine has the prefill engine whose offers it takes."""

    def __init__(
        self, prefill: CompletionServer | None = None, *, model: str = "tiny", metrics: bool = True, wrong: bool = False
    ) -> None:
        self.offers = self.delivered = 0
        self.rejects = False
        self.taken: list[int] = []  # how many tokens each request wanted that took an offer
        self.computes = threading.Event()
        self.computes.set()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics" and metrics:
                    self.say(
                        f"kvxfer_offers_in_hand {engine.offers}\nkvxfer_loads_in_hand 0\n"
                        f'kvxfer_requests_total{{outcome="delivered"}} {engine.delivered}\n'
                        f"kvxfer_kv_bytes_total {100 * engine.delivered}\n"
                    )
                elif self.path == "/v1/models":
                    self.say(json.dumps({"data": [{"id": model}]}))
                else:
                    self.say("there is no such page", 404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if engine.rejects:
                    self.say(json.dumps({"error": "no"}), 400)
                    return
                params = body.get("kv_transfer_params") or {}
                said = None
                if params.get("do_remote_decode"):
                    engine.offers += 1
                    said = {"do_remote_prefill": True}
                if params.get("do_remote_prefill") and prefill is not None:
                    prefill.offers -= 1
                    engine.delivered += 1
                    engine.taken.append(body["max_tokens"])
                    engine.computes.wait(30)
                text = hashlib.sha256(json.dumps([body["prompt"], wrong]).encode()).hexdigest()
                choices = [{"index": i, "text": text} for i in range(body.get("n", 1))]
                self.say(json.dumps({"choices": choices, "kv_transfer_params": said}))

            def say(self, text: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with suppress(ConnectionError):  # who has hung up
                    self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class World:
    """A prefill and a decode engine, and a router in front."""

    def __init__(self, **wrong: bool) -> None:
        drops = wrong.pop("drops", False)
        self.p = CompletionServer()
        self.d = CompletionServer(self.p, **wrong)  # type: ignore[arg-type]
        self.router = Router(self.p.url, self.d.url, SCHEMAS["nixl"], drops=drops)

    def run(self, *more: str, only: str = "n-4") -> tuple[int, str, str]:
        engines = ["--prefill", self.p.url, "--decode", self.d.url, "--within", "0.3", "--only", only]
        result = CliRunner().invoke(build(), ["conformance", "--router", self.router.url, *engines, *more])
        return result.exit_code, result.stdout, result.stderr

    def stop(self) -> None:
        for one in (self.router, self.p, self.d):
            one.stop()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    found = World(**getattr(request, "param", {}))
    yield found
    found.stop()


def test_a_router_that_keeps_the_contract(world: World) -> None:
    status, out, _ = world.run()
    assert status == 0, out
    assert "kept     n-4" in out and "1 cases kept, 0 broken, 0 left out" in out


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ({"drops": True}, "no request came with params: does the router pass them on?"),
        ({"wrong": True}, "text of choice 0 is"),
    ],
    indirect=["world"],
    ids=["drops", "other tokens"],
)
def test_a_router_that_breaks_it(world: World, said: str) -> None:
    status, out, _ = world.run("--json")
    (case,) = json.loads(out)["cases"]
    assert status == 1 and case["outcome"] == "broken" and said in case["said"]


@pytest.mark.parametrize("world", [{"drops": True}], indirect=True)
def test_what_is_held_is_found(world: World) -> None:
    assert "0.3 s after the answer the engines still hold 1 offers and 0 loads" in world.run()[1]


def test_a_client_hangs_up_while_a_decode_engine_computes(world: World) -> None:
    """And not before: a prefill engine would hold what it offers, and the router that it hung up on would be blamed."""
    world.d.computes.clear()
    status, out, _ = world.run(only="hang-up-list")
    world.d.computes.set()
    assert (status, world.d.taken) == (0, [200]), out


def test_a_router_that_answers_where_the_plain_server_rejects(world: World) -> None:
    plain = CompletionServer()
    plain.rejects = True
    status, out, _ = world.run("--plain", plain.url)
    plain.stop()
    assert status == 1 and "the router answers 200, the plain server 400" in out


def test_what_the_plain_server_does_not_serve_is_left_out(world: World) -> None:
    world.p.rejects = world.d.rejects = True
    status, out, _ = world.run()
    assert status == 0 and "left out n-4" in out and "the plain server answers 400 too" in out


@pytest.mark.parametrize(
    ("which", "url", "said"),
    [
        ("--router", CLOSED, "does not answer"),
        ("--prefill", CLOSED, "does not answer"),
        ("--plain", "ftp://x", "is not the URL of an HTTP server"),
        ("--plain", "{router}/nowhere", "is no server of the OpenAI API: it answers 404"),
        ("--decode", "{bare}", "has no metrics of kvxfer"),
        ("--decode", "{other}", "different models"),
    ],
)
def test_what_cannot_be_tested(world: World, which: str, url: str, said: str) -> None:
    bare, other = CompletionServer(metrics=False), CompletionServer(model="large")
    named = {"--router": world.router.url, "--prefill": world.p.url, "--decode": world.d.url}
    named[which] = url.format(router=world.p.url, bare=bare.url, other=other.url)
    result = CliRunner().invoke(build(), ["conformance", *(word for pair in named.items() for word in pair)])
    bare.stop()
    other.stop()
    assert result.exit_code == 3 and said in result.stderr and not result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--router", CLOSED],
        ["--router", CLOSED, "--prefill", CLOSED],
        ["tcp", "--router", CLOSED, "--prefill", CLOSED, "--decode", CLOSED],
        ["tcp", "--json"],
        [],
        ["--router", CLOSED, "--prefill", CLOSED, "--decode", CLOSED, "--only", "no such case"],
    ],
)
def test_wrong_arguments(words: list[str]) -> None:
    assert CliRunner().invoke(build(), ["conformance", *words]).exit_code == 2
