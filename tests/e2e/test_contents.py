"""Servers whose adapters or media have one name and two contents, or two names and one content."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer_vllm.demo.metrics import ReceivedKV, received
from kvxfer_vllm.demo.routing import PREFILL_PARAMS
from kvxfer_vllm.demo.servers import Server, await_ready, connector, ended_together
from tests.conftest import require
from tests.e2e.blip import look, picture, write_adapter, write_blip
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TEXT = " which weights and which pixels has this been computed with? " * 2
TOKENS = 16
RAW = '{"do_normalize": false}'


@dataclass
class Servers:
    """``prefill`` serves the model of the others from another path; ``raw`` does not normalise images."""

    plain: Server
    prefill: Server
    raw: Server
    decode: Server
    folder: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    require("vllm")
    folder = tmp_path_factory.mktemp("contents")
    write_blip(folder / "model")
    shutil.copytree(folder / "model", folder / "copy")
    for name, seed in (("one", 1), ("two", 2), ("two elsewhere", 2), ("again", 1), ("decode", 1)):
        write_adapter(folder / name, seed)
    with ended_together() as begun:

        def start(name: str, role: str | None, model: str, adapters: dict[str, str], *flags: str) -> Server:
            transfer = None if role is None else {**connector(role, PATIENT), "kv_load_failure_policy": "recompute"}
            modules = [f"{adapter}={folder / path}" for adapter, path in adapters.items()]
            more = [
                "--enable-lora",
                "--max-loras",
                "2",
                "--max-lora-rank",
                "8",
                *(["--lora-modules", *modules] if modules else []),
            ]
            env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
            server = Forked(name, folder / model, folder, transfer, [*flags, *more], env=env)
            begun.append(server)
            return server

        out = Servers(
            start("plain", None, "model", {"one": "one", "two": "two"}),
            start("prefill", "kv_producer", "copy", {"a": "one", "b": "two elsewhere", "again": "again"}),
            start("raw", "kv_producer", "model", {}, "--mm-processor-kwargs", RAW),
            start("decode", "kv_consumer", "model", {"a": "two", "again": "decode"}),
            folder,
        )
        await_ready(begun, 300)
        yield out


def ask(server: Server, model: str, text: str, params: dict[str, Any] | None = None, tokens: int = TOKENS) -> Any:
    body: dict[str, Any] = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    if params is not None:
        body["kv_transfer_params"] = params
    answer = server.post("/v1/completions", body, 120.0)
    return answer["choices"][0]["token_ids"], answer.get("kv_transfer_params")


def moved(servers: Servers, before: ReceivedKV) -> int:
    return (received(servers.decode) - before).tokens


def load(server: Server, name: str, path: Path) -> None:
    """The answer is not JSON."""
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/load_lora_adapter", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def test_two_adapters_of_one_name(servers: Servers) -> None:
    text = f"two adapters:{TEXT}"
    expected, _ = ask(servers.plain, "two", text)
    assert expected != ask(servers.plain, "one", text)[0], "adapters that make no difference would show nothing"
    before = received(servers.decode)
    _, params = ask(servers.prefill, "a", text, PREFILL_PARAMS, 1)
    got, _ = ask(servers.decode, "a", text, params)
    assert moved(servers, before) == 0 and got == expected


def test_one_adapter_under_two_names_and_paths(servers: Servers) -> None:
    text = f"one adapter:{TEXT}"
    before = received(servers.decode)
    _, params = ask(servers.prefill, "b", text, PREFILL_PARAMS, 1)
    got, _ = ask(servers.decode, "a", text, params)
    assert moved(servers, before) > 100 and got == ask(servers.plain, "two", text)[0]


def test_an_adapter_loaded_again_in_place(servers: Servers) -> None:
    """First at the decode server alone, between offer and load; then at both. The prompt stays, which vLLM has cached."""
    text = f"loaded again:{TEXT}"
    old, new = (ask(servers.plain, name, text)[0] for name in ("one", "two"))
    before = received(servers.decode)
    _, params = ask(servers.prefill, "again", text, PREFILL_PARAMS, 1)
    got, _ = ask(servers.decode, "again", text, params)
    assert moved(servers, before) > 100 and got == old
    _, params = ask(servers.prefill, "again", text, PREFILL_PARAMS, 1)
    write_adapter(servers.folder / "decode", 2)
    load(servers.decode, "again", servers.folder / "decode")
    before = received(servers.decode)
    got, _ = ask(servers.decode, "again", text, params)
    assert moved(servers, before) == 0 and got == new
    write_adapter(servers.folder / "again", 2)
    load(servers.prefill, "again", servers.folder / "again")
    other = f"on both:{TEXT}"
    for prompt in (text, other):
        before = received(servers.decode)
        _, params = ask(servers.prefill, "again", prompt, PREFILL_PARAMS, 1)
        got, _ = ask(servers.decode, "again", prompt, params)
        assert got == ask(servers.plain, "two", prompt)[0]
    assert moved(servers, before) > 100


def test_an_image_of_one_checkpoint_at_two_paths_is_loaded(servers: Servers) -> None:
    image, other = picture(1), picture(2)
    expected, _ = look(servers.plain, image, TEXT, TOKENS)
    assert expected != look(servers.plain, other, TEXT, TOKENS)[0], (
        "an image that makes no difference would show nothing"
    )
    before = received(servers.decode)
    _, params = look(servers.prefill, image, TEXT, 1, PREFILL_PARAMS)
    got, _ = look(servers.decode, image, TEXT, TOKENS, params)
    assert moved(servers, before) > 100 and got == expected


def test_an_image_that_was_processed_in_another_way_is_not_loaded(servers: Servers) -> None:
    image, text = picture(3), f"raw:{TEXT}"
    before = received(servers.decode)
    _, params = look(servers.raw, image, text, 1, PREFILL_PARAMS)
    got, _ = look(servers.decode, image, text, TOKENS, params)
    assert moved(servers, before) == 0 and got == look(servers.plain, image, text, TOKENS)[0]
    _, params = ask(servers.raw, "tiny", text, PREFILL_PARAMS, 1)
    got, _ = ask(servers.decode, "tiny", text, params)
    assert moved(servers, before) > 100 and got == ask(servers.plain, "tiny", text)[0]


def test_two_images_of_one_uuid(servers: Servers) -> None:
    text = f"named:{TEXT}"
    before = received(servers.decode)
    _, params = look(servers.prefill, picture(4), text, 1, PREFILL_PARAMS, uuid="logo")
    got, _ = look(servers.decode, picture(5), text, TOKENS, params, uuid="logo")
    assert moved(servers, before) == 0 and got == look(servers.plain, picture(5), text, TOKENS)[0]
