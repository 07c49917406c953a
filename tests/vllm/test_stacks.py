"""What the stacks that route and run engines read and write: the name of a connector, and `kv_transfer_params`.

Dynamo and Ray Serve LLM shape params by their own code (`stacks.py`); vllm-router runs in `make fleet`. The others are programs in
Go or services, and are played by what their code does with the params: who relays them whole, who overwrites what, who sends to both
sides at once.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvxfer.errors import ConfigError
from kvxfer_vllm import KVXferConnector, register
from kvxfer_vllm.migration import ConnectorConfig
from kvxfer_vllm.nixl import NixlConnector
from tests.conftest import require
from tests.ports import free_ports
from tests.vllm import stacks
from tests.vllm.cases import check
from tests.vllm.conftest import Make
from tests.vllm.engine import PlayedEngine, prompt

Params = dict[str, Any]

PAGE = Path(__file__).parents[2] / "docs" / "fit-a-stack.md"
CONFIGS = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.S)

ASKED: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What all of them send to P that speak NIXL's schema."""


def whole(params: Params, p: PlayedEngine) -> Params:
    """vllm-router, vLLM's toy proxy, llm-d's sidecar (`nixlv2`), KServe, Ray Serve LLM, Dynamo: as it is."""
    return params


def elsewhere(params: Params, p: PlayedEngine) -> Params:
    """AIBrix (`shfs`) and production-stack: with the host at which they reach P's HTTP server."""
    return {**params, "remote_host": "192.0.2.200"}


def with_more(params: Params, p: PlayedEngine) -> Params:
    """Dynamo and SMG add keys of their own."""
    return {**params, "worker_id": 7, "bootstrap": {"room": 1}}


RELAYS = pytest.mark.parametrize("relay", [whole, elsewhere, with_more])


@RELAYS
def test_a_stack_that_relays(make: Make, relay: Callable[[Params, PlayedEngine], Params]) -> None:
    p, d = make(role="kv_producer"), make(role="kv_consumer")
    text = prompt(70)
    at_p = p.add(text, copy.deepcopy(ASKED), n=1)
    p.run(until=at_p)
    said = json.loads(json.dumps(p.done[at_p].params))  # over HTTP
    # What they look for: keys of NIXL's schema, with types as NixlConnector has them.
    assert said["do_remote_prefill"] is True and said["do_remote_decode"] is False
    assert isinstance(said["remote_block_ids"], list) and said["remote_block_ids"]
    for key, kind in {
        "remote_engine_id": str,
        "remote_request_id": str,
        "remote_host": str,
        "remote_port": int,
    }.items():
        assert isinstance(said[key], kind)
    assert isinstance(said["tp_size"], int)
    name = d.add(text, relay(said, p))
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


def test_a_stack_that_insists_on_the_name(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo and SMG know connectors by a list of names, on which kvxfer is not."""

    def config(role: str) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="kvxfer_vllm.nixl",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"backends": ["UCX"], "kv_lease_duration": 30, "num_threads": 4},
        )

    found = KVConnectorFactory.get_connector_class(config("kv_both"))
    assert found is NixlConnector and issubclass(found, KVXferConnector)
    assert found.__name__ == "KVXferConnector", "else vLLM takes its statistics for NIXL's inside MultiConnector"
    with caplog.at_level("WARNING", "kvxfer.vllm"):
        p, d = make(transfer=config("kv_producer")), make(transfer=config("kv_consumer"))
    assert "this NixlConnector is kvxfer under that name" in caplog.text
    for key in ("backends", "kv_lease_duration", "num_threads"):
        assert f"setting '{key}' of NixlConnector" in caplog.text
    text = prompt(70)
    at_p = p.add(text, copy.deepcopy(ASKED), n=1)
    p.run(until=at_p)
    name = d.add(text, p.done[at_p].params)
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


def test_the_name_alone_is_vllm_s_own() -> None:
    """Who does not ask for kvxfer by its path does not get it."""
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    try:
        assert not issubclass(KVConnectorFactory.get_connector_class(transfer), KVXferConnector)
    except ImportError:
        pass  # NIXL is not installed


def test_settings_under_the_name_are_checked_all_the_same(make: Make) -> None:
    with pytest.raises(ConfigError, match="did you mean 'lease'"):
        make(
            transfer=KVTransferConfig(
                kv_connector="NixlConnector",
                kv_connector_module_path="kvxfer_vllm.nixl",
                kv_role="kv_both",
                kv_connector_extra_config={"leese": 1},
            )
        )


class Request(BaseModel):
    """What Ray's code touches of a request of the OpenAI API."""

    kv_transfer_params: dict[str, Any] | None = None
    max_tokens: int = 16
    stream: bool = True
    request_id: str = ""


def by_dynamo(transfer: KVTransferConfig) -> tuple[Params, Callable[[Params], Params]]:
    protocol = stacks.load(stacks.DYNAMO).make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=transfer))
    to_p = protocol.prefill_request_kv_transfer_params()
    return to_p, lambda said: protocol.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=said))


def by_ray(transfer: KVTransferConfig) -> tuple[Params, Callable[[Params], Params]]:
    backend = stacks.load(stacks.RAY).DefaultConnectorBackend(
        None
    )  # what it takes for a connector that it does not know
    to_p = backend.prepare_prefill_request(request=Request(), peer=None)
    assert to_p.max_tokens == 1 and not (backend.concurrent_handoff or backend.requires_peer_binding)

    def to_d(said: Params) -> Params:
        answer = SimpleNamespace(kv_transfer_params=said)
        found = backend.prepare_decode_request(request=Request(), peer=None, prefill_response=answer)
        return dict(found.kv_transfer_params)

    return to_p.kv_transfer_params, to_d


NAMED: Params = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvxfer_vllm.nixl"}
WRAPPED: Params = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{**NAMED, "kv_role": "kv_both"}]},
}
OURS: Params = {"kv_connector": "KVXferConnector", "kv_connector_module_path": "kvxfer_vllm"}


@pytest.mark.parametrize(
    ("stack", "named"),
    [(by_dynamo, NAMED), (by_dynamo, WRAPPED), (by_ray, OURS)],
    ids=["dynamo", "dynamo, multi", "ray"],
)
def test_a_stack_s_own_code(make: Make, stack: Callable[[KVTransferConfig], Any], named: Params) -> None:
    require("stacks")
    transfer = KVTransferConfig(**named, kv_role="kv_both", kv_load_failure_policy="recompute")
    to_p, to_d = stack(transfer)
    p, d = make(transfer=copy.deepcopy(transfer)), make(transfer=copy.deepcopy(transfer))
    text = prompt(70)
    at_p = p.add(text, json.loads(json.dumps(to_p)), n=1)
    p.run(until=at_p)
    name = d.add(text, json.loads(json.dumps(to_d(p.done[at_p].params))))
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


def test_dynamo_does_not_take_our_own_name() -> None:
    require("stacks")
    with pytest.raises(ValueError, match="Unsupported kv_connector='KVXferConnector'"):
        by_dynamo(KVTransferConfig(**OURS, kv_role="kv_both"))


class Replica:
    """A replica of Ray Serve LLM, as far as kvxfer's part of it is asked."""

    def __init__(self, rank: int, transfer: Params, **engine: Any) -> None:
        base = stacks.load(stacks.RAY)
        base.serve.get_replica_context = lambda: SimpleNamespace(rank=SimpleNamespace(rank=rank))
        self.transfer = transfer
        config = SimpleNamespace(
            engine_kwargs={"kv_transfer_config": transfer, **engine},
            get_engine_config=lambda: SimpleNamespace(num_devices=1),
        )
        self.backend = stacks.for_ray(base).KVXferBackend(config)
        self.backend.setup()

    def engine(self, make: Make) -> PlayedEngine:
        return make(transfer=KVTransferConfig(**self.transfer, kv_load_failure_policy="recompute"))


def test_ray_sends_to_both_at_once(make: Make) -> None:
    require("stacks")
    port = free_ports(2)
    first, second = (
        Replica(i, {**OURS, "kv_role": "kv_producer", "kv_connector_extra_config": {"port": port}}) for i in (0, 1)
    )
    decode = Replica(0, {**OURS, "kv_role": "kv_consumer"})
    d = decode.engine(make)
    assert decode.backend.requires_peer_binding and decode.backend.concurrent_handoff
    for n, prefill in enumerate((first, second)):
        p = prefill.engine(make)
        assert p.address.port == port + n
        peer, text = json.loads(json.dumps(prefill.backend.replica_metadata())), prompt(70, seed=n)
        asked = Request(request_id="the client's, and not always its own")
        to_p = decode.backend.prepare_prefill_request(request=asked, peer=peer)
        to_d = decode.backend.prepare_decode_request(request=asked, peer=peer, prefill_response=None)
        assert (to_p.max_tokens, to_p.stream, to_d.max_tokens, to_d.stream) == (1, False, 16, True)
        name = d.add(text, to_d.kv_transfer_params)
        d.steps(2)
        p.add(text, to_p.kv_transfer_params, n=1)
        d.run(p, until=name)
        check(d, name, text)
        assert d.computed[name] == 1 + 3


def test_ray_s_transfers_have_names_of_their_own() -> None:
    """A client may give two requests one id, and Ray may handle a request again."""
    require("stacks")
    decode, asked = Replica(0, {**OURS, "kv_role": "kv_consumer"}), Request(request_id="one for all")
    names = set()
    for _ in range(2):
        to_p = decode.backend.prepare_prefill_request(request=asked, peer={})
        to_d = decode.backend.prepare_decode_request(request=asked, peer={}, prefill_response=None)
        assert to_p.kv_transfer_params["transfer_id"] == to_d.kv_transfer_params["transfer_id"]
        names.add(to_p.kv_transfer_params["transfer_id"])
    assert len(names) == 2


def test_a_prefill_replica_of_ray_needs_a_port() -> None:
    require("stacks")
    for role in ("kv_producer", "kv_both"):
        with pytest.raises(ConfigError, match="set 'port' in kv_connector_extra_config"):
            Replica(0, {**OURS, "kv_role": role})


def test_a_data_parallel_rank_of_ray_has_the_port_that_its_engine_takes() -> None:
    """The engine adds its rank's number by itself."""
    require("stacks")
    settings: Params = {**OURS, "kv_role": "kv_producer", "kv_connector_extra_config": {"port": 7000}}
    ranks = [Replica(5, copy.deepcopy(settings), data_parallel_rank=rank) for rank in (0, 1)]
    assert [rank.backend.replica_metadata()["kvxfer_port"] for rank in ranks] == [7000, 7001]
    assert all(rank.transfer["kv_connector_extra_config"]["port"] == 7000 for rank in ranks)


@pytest.mark.parametrize("text", CONFIGS)
def test_the_page_s_configurations_are_taken(text: str) -> None:
    register()  # as vLLM has its plug-ins do
    found = json.loads(text)
    transfer = KVTransferConfig(**found.get("kv_transfer_config", found))
    assert transfer.kv_load_failure_policy == "recompute"
    assert issubclass(KVConnectorFactory.get_connector_class(transfer), KVXferConnector)
    ConnectorConfig.from_mapping(transfer.kv_connector_extra_config)
