"""Servers of one architecture and other weights: nothing is loaded, both fingerprints are told, every request is answered."""

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from kvxfer_vllm.content.hashing import fingerprint
from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Server, await_ready, connector, ended_together
from tests.conftest import require
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TEXT = "which weights has this been computed with? " * 4


@dataclass
class Servers:
    """``decode`` and ``moved`` serve one model from two folders, in two forms; ``tuned`` another of the same shape."""

    decode: Server
    moved: Server
    tuned: Server
    models: Path


def in_two_files(model: Path, folder: Path) -> None:
    """The same model, in a checkpoint of another form."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i in range(2):
        part = {name: t for n, (name, t) in enumerate(sorted(tensors.items())) if n % 2 == i}
        save_file(part, folder / f"part-{i}.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    require("vllm")
    folder = tmp_path_factory.mktemp("weights")
    write_model(folder / "base")
    in_two_files(folder / "base", folder / "moved")
    write_model(folder / "tuned", seed=1)
    with ended_together() as begun:

        def start(name: str, model: str, role: str) -> Server:
            transfer = {**connector(role, PATIENT), "kv_load_failure_policy": "recompute"}
            server = Forked(name, folder / model, folder, transfer, env={"VLLM_SERVER_DEV_MODE": "1"})
            begun.append(server)
            return server

        out = Servers(
            start("decode", "base", "kv_consumer"),
            start("moved", "moved", "kv_producer"),
            start("tuned", "tuned", "kv_producer"),
            folder,
        )
        await_ready([out.decode, out.moved, out.tuned], 300)
        yield out


def test_other_weights_are_refused_by_both_fingerprints_and_the_request_is_answered(servers: Servers) -> None:
    prompt = f"tuned: {TEXT}"
    expected = complete(servers.decode, prompt, 24).tokens
    assert complete(servers.tuned, prompt, 24).tokens != expected, "weights that make no difference would show nothing"
    prompt = f"again: {TEXT}"
    before = received(servers.decode)
    got = prefill_then_decode(servers.tuned, servers.decode, prompt, 24).tokens
    moved = received(servers.decode) - before
    assert moved.tokens == 0 and moved.failed == 1
    ours, theirs = fingerprint(servers.models / "base"), fingerprint(servers.models / "tuned")
    assert f"weights: {ours} here, {theirs} at the producer" in servers.decode.log.read_text()
    assert got == complete(servers.decode, prompt, 24).tokens


def test_the_same_weights_from_another_folder_in_another_form_are_loaded(servers: Servers) -> None:
    prompt = f"moved: {TEXT}"
    before = received(servers.decode)
    got = prefill_then_decode(servers.moved, servers.decode, prompt, 24).tokens
    moved = received(servers.decode) - before
    assert moved.tokens > 100 and moved.failed == 0
    assert got == complete(servers.decode, prompt, 24).tokens


def reset(server: Server) -> None:
    """What is done around a change of weights in place: asked again while blocks are in use, as vLLM wants it."""
    deadline = time.monotonic() + 30
    while True:
        request = urllib.request.Request(f"{server.url}/reset_prefix_cache?reset_external=true", b"", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            if json.load(answer)["success"]:
                return
        assert time.monotonic() < deadline, "blocks are in use, and stay so"
        time.sleep(0.5)


def test_weights_changed_in_place_on_one_side_and_then_on_both(servers: Servers) -> None:
    reset(servers.decode)
    before = received(servers.decode)
    first = f"one side: {TEXT}"
    got = prefill_then_decode(servers.moved, servers.decode, first, 24).tokens
    moved = received(servers.decode) - before
    assert moved.tokens == 0 and moved.failed == 1
    assert "updates: 1 here, 0 at the producer" in servers.decode.log.read_text()
    assert got == complete(servers.decode, first, 24).tokens
    reset(servers.moved)
    before = received(servers.decode)
    second = f"both sides: {TEXT}"
    got = prefill_then_decode(servers.moved, servers.decode, second, 24).tokens
    moved = received(servers.decode) - before
    assert moved.tokens > 100 and moved.failed == 0
    assert got == complete(servers.decode, second, 24).tokens
