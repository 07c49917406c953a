"""``kvxfer bench fleet``: vllm-router in front of two prefill and two decode servers, used by the stock OpenAI client.

The router is the program that PyPI has, in an environment of its own, and knows nothing of kvxfer. During the requests one prefill server
is killed, and a successor joins at its address, as a cluster manager would have it. Ends with one line of JSON, and exits 1 unless
every request had the plain server's tokens.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli.terminal import Say
from kvxfer_bench.options import Backend, KeepLogs, Requests
from kvxfer_bench.servers import Starter, starting
from kvxfer_bench.vllm.clients import START_S, Clients, expectations, reported, wishes
from kvxfer_vllm.demo.metrics import received, total
from kvxfer_vllm.demo.servers import Server, await_ready, connector, ended_together, free_port

JOIN_S = 180.0
AMID_S = 30.0
"""Within this a prefill server under load has an offer in hand."""
HEALTH_S = 1
"""How often the router looks whether servers live."""


def fleet(
    requests: Requests = 200,
    router: Annotated[str, typer.Option(help="Name or path of the program vllm-router.")] = "vllm-router",
    backend: Backend = "tcp",
    keep_logs: KeepLogs = None,
) -> None:
    """Send mixed requests through vllm-router to two prefill and two decode servers, kill a prefill server and start another.

    Prints one JSON object at the end. Exits with 1 if a request did not get a plain server's tokens, or anything else went wrong.
    """
    program = shutil.which(router)
    if program is None:
        raise typer.BadParameter(f"there is no program {router!r}; pip install vllm-router", param_hint="--router")

    def run(say: Say) -> dict[str, Any]:
        with starting("tiny", keep_logs=keep_logs) as starter:
            return _run(starter, program, backend, requests, say)

    reported(requests, run)


def _run(starter: Starter, program: str, backend: str, requests: int, say: Say) -> dict[str, Any]:
    wanted = wishes(requests)
    expected = expectations(starter.model, starter.logs, wanted)
    say("the plain server has answered all prompts")

    def start(name: str, role: str, port: int | None = None) -> Server:
        settings = {"backend": backend, "peer_timeout": 10.0}
        transfer = {**connector(f"kv_{role}", settings), "kv_load_failure_policy": "recompute"}
        return starter.start(name, role, transfer, port=port)

    prefills = [start(f"prefill-{n}", "producer") for n in range(2)]
    decodes = [start(f"decode-{n}", "consumer") for n in range(2)]
    await_ready([*prefills, *decodes], START_S, lambda server: say(f"{server.name} answers"))
    with routed(program, prefills, decodes, starter.logs) as url:
        say("the router answers")
        with Clients(url, expected) as clients:
            answers = clients.answers
            last = requests * 3 // 4
            clients.send(wanted[:last])
            answers.wait(requests // 4)
            amid = _kill_amid(prefills[0])
            say(f"after {answers.done} requests: killed {prefills[0].name}, which had {amid} offers in hand")
            port = int(prefills[0].url.rpartition(":")[2])
            successor = start("prefill-2", "producer", port)
            await_ready([successor], JOIN_S)
            say(f"after {answers.done} requests: {successor.name} answers at its address")
            time.sleep(2 * HEALTH_S)  # the router has to see it
            clients.send(wanted[last:])
        fetched = total(successor, "kvxfer_offers_total")
        say(f"all requests have ended, and {fetched:g} offers of {successor.name}")
    loads = [received(server) for server in decodes]
    external = sum(load.tokens for load in loads)
    errors = {server.name: _errors(server) for server in decodes}
    return answers.report(
        {
            "killed": int(prefills[0].ended(0.0)),
            "offers_killed": amid,
            "joined": int(fetched > 0),
            "streamed": sum(wish.streams for wish in wanted),
            "external_tokens": external,
            "failed_loads": sum(load.failed for load in loads),
            "server_errors": int(sum(errors.values())),
        },
        {
            "the prefill server that was killed had no offer in hand: nothing was interrupted": not amid,
            "the prefill server that joined got no request": not fetched,
            "no KV was moved: the decode servers computed all prompts themselves": not external,
            **{f"{name} answered requests with errors": count > 0 for name, count in errors.items()},
        },
    )


def _kill_amid(server: Server) -> int:
    """Kill a prefill server while KV of it is fetched or waits for that; return how many offers it had in hand."""
    until = time.monotonic() + AMID_S
    while not (offers := int(total(server, "kvxfer_offers_in_hand"))) and time.monotonic() < until:
        time.sleep(0.01)
    server.kill()
    return offers


def _errors(server: Server) -> float:
    """Return how many requests a server has answered with 5xx."""
    return total(server, "http_requests_total", lambda has: has["status"].startswith("5"))


class Router(Server):
    """The program vllm-router in front of these servers."""

    def __init__(self, program: str, prefills: Sequence[Server], decodes: Sequence[Server], logs: Path) -> None:
        self.name, self.log, port = "router", logs / "router.log", free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [program, "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--health-check-interval-secs", str(HEALTH_S), "--health-failure-threshold", "1"]
        command += ["--health-success-threshold", "1", "--worker-startup-check-interval", "1"]
        command += ["--cb-timeout-duration-secs", "5"]
        for role, servers in (("--prefill", prefills), ("--decode", decodes)):
            command += [word for server in servers for word in (role, server.url)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )


@contextmanager
def routed(program: str, prefills: Sequence[Server], decodes: Sequence[Server], logs: Path) -> Iterator[str]:
    """Run vllm-router in front of these servers, and yield its URL.

    Raises:
        ServerError: It did not start.
    """
    with ended_together() as begun:
        begun.append(Router(program, prefills, decodes, logs))
        await_ready(begun, 60)
        yield begun[0].url
