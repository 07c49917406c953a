"""A prefill server of two data-parallel ranks, a decode server and a router, each on a host of its own (see `tests.networks`).

The router speaks to both by their hosts' addresses, and the two to each other by what `advertise: auto` has found: whatever is
said of 127.0.0.1 finds nobody.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from kvxfer_vllm.demo.routing import complete
from kvxfer_vllm.demo.servers import Cluster
from tests.conftest import require
from tests.e2e.on_hosts import Told
from tests.networks import Host, hosts
from tests.vllm import stacks

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

PROMPTS = [f"host {n}: " + "".join(chr(97 + (n + k * k) % 26) for k in range(40 + 70 * n)) for n in range(8)]
ROUTED = [f"routed {prompt}" for prompt in PROMPTS]


@dataclass
class Run:
    """What has come of it, by whom it was routed, and the prefill server's host."""

    by_us: Told
    by_router: Told | None
    prefill: Host


@pytest.fixture(scope="module")
def run(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    require("networks")
    expected = [{p: complete(cluster.plain, p, 24).tokens for p in prompts} for prompts in (PROMPTS, ROUTED)]
    logs = tmp_path_factory.mktemp("hosts")
    with hosts(3) as (prefill, decode, router):
        argument = json.dumps([str(model), str(logs), [asdict(prefill), asdict(decode)], stacks.router(), *expected])
        command = [*router.into, sys.executable, "-m", "tests.e2e.on_hosts", argument]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            try:
                said = program.communicate(timeout=390)[0]
            finally:
                program.terminate()  # and it ends its servers
        assert program.returncode == 0
        by_us, *by_router = (Told(**told) for told in json.loads(said))
        yield Run(by_us, by_router[0] if by_router else None, prefill)


def test_tokens_are_those_of_a_plain_server_and_kv_came_from_another_host(run: Run) -> None:
    assert (run.by_us.identical, run.by_us.objections) == (8, [])
    assert (run.by_us.loaded, run.by_us.failed) == (sum(len(prompt) - 1 for prompt in PROMPTS), 0)


def test_each_rank_has_a_place_of_its_own_on_its_host(run: Run) -> None:
    assert run.by_us.prefilled == {"0": 4, "1": 4}
    places = [tuple(place) for place in run.by_us.places]
    assert {host for host, _ in places} == {run.prefill.address}
    assert len(set(places)) == 2 and places == places[:2] * 4


def test_a_router_from_elsewhere(run: Run) -> None:
    """vllm-router as PyPI has it; it does not know of the ranks, between which vLLM balances by itself."""
    require("vllm_router")
    assert run.by_router is not None
    assert (run.by_router.identical, run.by_router.objections) == (8, [])
    assert (run.by_router.loaded, run.by_router.failed) == (sum(len(prompt) - 1 for prompt in ROUTED), 0)
    assert sum(run.by_router.prefilled.values()) == 8 and min(run.by_router.prefilled.values()) > 0
