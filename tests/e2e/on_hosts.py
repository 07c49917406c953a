"""The program of `test_hosts.py`: on a router's host, it starts the servers on theirs and routes requests through them.

It says as JSON what has come of them: of those that it routed itself, to each rank of the prefill server in turn, and of those that went
by vllm-router, where that is there.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvxfer_bench.vllm.clients import Answers, Clients, Wish
from kvxfer_bench.vllm.fleet import routed
from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import Server, await_ready, connector, ended_by_sigterm, ended_together
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Fresh
from tests.networks import Host

RANKS = 2

Tokens = Mapping[str, list[int]]
"""Of each prompt, what a plain server makes of it."""


@dataclass
class Told:
    """What has come of some requests.

    Attributes:
        places: Where the decode server was told to find the KV.
        identical: How many had the plain server's tokens.
        objections: What there is to say of the others.
        loaded: Of how many prompt tokens the KV came to the decode server.
        failed: Transfers that did not deliver.
        prefilled: How many requests each rank of the prefill server has answered.
    """

    places: list[tuple[str, int]] = field(default_factory=list)
    identical: int = 0
    objections: list[str] = field(default_factory=list)
    loaded: int = 0
    failed: int = 0
    prefilled: dict[str, int] = field(default_factory=dict)


class Pair:
    """The two servers, at the same port of their hosts."""

    def __init__(self, begun: list[Server], model: Path, logs: Path, prefill: Host, decode: Host) -> None:
        def start(name: str, role: str, host: Host, *flags: str) -> Server:
            config = connector(role, {**PATIENT, "advertise": "auto"})
            server = Fresh(name, model, logs, config, flags, port=8000, host=host.address, before=host.across)
            begun.append(server)
            return server

        self._logs = logs
        self._prefill = start("prefill", "kv_producer", prefill, "--data-parallel-size", str(RANKS))
        self._decode = start("decode", "kv_consumer", decode)
        await_ready([self._prefill, self._decode], 300.0)

    def by_us(self, expected: Tokens) -> Told:
        answers = Answers()
        with self._told(answers) as told:
            for n, (prompt, tokens) in enumerate(expected.items()):
                offered = complete(self._prefill, prompt, 1, PREFILL_PARAMS, rank=n % RANKS).kv_transfer_params
                assert offered is not None
                told.places.append((offered["remote_host"], offered["remote_port"]))
                got = complete(self._decode, prompt, len(tokens), offered).tokens
                answers.add(Wish(prompt, len(tokens), streams=False), got, tokens)
        return told

    def by_router(self, program: str, expected: Tokens) -> Told:
        wanted = [Wish(prompt, len(tokens), n % 2 == 1) for n, (prompt, tokens) in enumerate(expected.items())]
        with routed(program, [self._prefill], [self._decode], self._logs) as url, Clients(url, expected) as clients:
            with self._told(clients.answers) as told:
                clients.send(wanted)
                clients.answers.wait(len(wanted))
        return told

    @contextmanager
    def _told(self, answers: Answers) -> Iterator[Told]:
        told, before, prefilled = Told(), received(self._decode), self._prefilled()
        yield told
        got = received(self._decode) - before
        told.identical, told.objections = answers.identical, [*answers.wrong, *answers.failed]
        told.loaded, told.failed = got.tokens, got.failed
        told.prefilled = {rank: n - prefilled[rank] for rank, n in self._prefilled().items()}

    def _prefilled(self) -> dict[str, int]:
        out = {str(rank): 0 for rank in range(RANKS)}
        for family in text_string_to_metric_families(self._prefill.metrics()):
            for sample in family.samples:
                if sample.name == "vllm:request_success_total":
                    out[sample.labels["engine"]] += int(sample.value)
        return out


def main(model: str, logs: str, places: list[dict[str, object]], program: str | None, *expected: Tokens) -> None:
    prefill, decode = (Host(**place) for place in places)
    with ended_by_sigterm(), ended_together() as begun:
        pair = Pair(begun, Path(model), Path(logs), prefill, decode)
        out = [pair.by_us(expected[0])]
        if program is not None:
            out.append(pair.by_router(program, expected[1]))
        print(json.dumps([asdict(told) for told in out]), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
