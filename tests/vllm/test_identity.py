"""What a vLLM engine states of its model: the weights by what they are, wherever they lie and however they are cut."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvxfer.config import Config
from kvxfer.control import sockets as sockets
from kvxfer.facts import check
from kvxfer.geometry import Cache
from kvxfer.protocol import messages as m
from kvxfer.security import OPEN, Security, make_key
from kvxfer_vllm.content import hashing as weights
from kvxfer_vllm.content.facts import facts_of, updated
from kvxfer_vllm.content.hashing import fingerprint
from tests.vllm.cases import OFFER
from tests.vllm.conftest import Make
from tests.vllm.engine import MODEL, PlayedEngine, answer, ours, prompt

Weights = dict[str, np.ndarray]


def drawn(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {f"layers.{i}.{name}": rng.normal(size=(64, 96)).astype(np.float32) for i in range(6) for name in "abc"}


def write(folder: Path, tensors: Weights, files: int = 1, form: str = "model") -> Path:
    """A checkpoint in so many files; they hold the tensors in turn, so that no two forms have one order."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    where = {name: f"{form}-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file(
            {n: tensors[n] for n in reversed(names) if where[n] == file}, folder / file, metadata={"format": "pt"}
        )
    if files > 1:
        (folder / f"{form}.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


# --- the fingerprint -----------------------------------------------------------------------------------------------


def test_one_checkpoint_has_one_fingerprint_however_it_is_cut(tmp_path: Path) -> None:
    found = {fingerprint(write(tmp_path / str(n), drawn(), files=n)) for n in (1, 2, 5, 18)}
    assert len(found) == 1


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    whole = fingerprint(write(tmp_path / "a", drawn(), files=2))
    again = write(tmp_path / "b", drawn(), files=2)
    write(again, drawn(), files=1, form="consolidated")
    save_file(drawn(7), again / "leftover.safetensors")
    assert fingerprint(again) == whole


@pytest.mark.parametrize("name", ["layers.0.a", "layers.5.c"])
def test_other_weights(tmp_path: Path, name: str) -> None:
    """One tensor of them is another: its values, its shape, its type, or its name."""
    before = fingerprint(write(tmp_path / "0", drawn()))
    tensor = drawn()[name]
    others = [
        {**drawn(), name: drawn(1)[name]},
        {**drawn(), name: tensor.reshape(96, 64)},
        {**drawn(), name: tensor.view(np.int32)},
        {**{n: t for n, t in drawn().items() if n != name}, name + "x": tensor},
    ]
    found = {fingerprint(write(tmp_path / str(i + 1), other)) for i, other in enumerate(others)}
    assert len(found | {before}) == 5


def test_ranks_that_each_have_a_file_of_their_own(tmp_path: Path) -> None:
    """Tensors of one name in several files, as vLLM saves its shards."""
    for folder, seeds in (("a", (1, 2)), ("b", (2, 1))):
        (tmp_path / folder).mkdir()
        for rank, seed in enumerate(seeds):
            save_file(drawn(seed), tmp_path / folder / f"model-rank-{rank}-part-0.safetensors")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_other_formats(tmp_path: Path, name: str) -> None:
    content = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    found = set()
    for i, other in enumerate((content, content[:-1], content[::-1])):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / name).write_bytes(other.tobytes())
        found.add(fingerprint(tmp_path / str(i)))
    assert len(found) == 3
    assert fingerprint(tmp_path / "0" / name) == fingerprint(tmp_path / "0")


def test_a_large_checkpoint_costs_a_bounded_number_of_small_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, each, size = 200, 40, 1 << 27
    for f in range(files):
        names = [f"layers.{f}.experts.{t}.weight" for t in range(each)]
        header: Any = {
            name: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [t * size, (t + 1) * size]}
            for t, name in enumerate(names)
        }
        content = json.dumps(header).encode()
        with (tmp_path / f"model-{f:05}.safetensors").open("wb") as out:
            out.write(len(content).to_bytes(8, "little") + content)
            out.truncate(8 + len(content) + each * size)
    reads: list[int] = []
    pread = os.pread

    def counted(descriptor: int, length: int, at: int) -> bytes:
        reads.append(length)
        return pread(descriptor, length, at)

    monkeypatch.setattr(weights.os, "pread", counted)
    fingerprint(tmp_path)
    assert len(reads) <= weights.MAX_SAMPLES + 2 * files and sum(reads) < 8 << 20, "of a terabyte"


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 64, (8).to_bytes(8, "little") + b"not json"])
def test_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors does not begin like safetensors"):
        fingerprint(tmp_path)


def test_a_tensor_that_lies_outside_of_its_file(tmp_path: Path) -> None:
    content = json.dumps({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(31))
    with pytest.raises(ValueError, match="'a' lies outside"):
        fingerprint(tmp_path)


@dataclass
class Layers:
    """What vLLM makes of ``--quantization-config``."""

    linear: Any = None
    ignore: list[str] = field(default_factory=list)
    targets: dict[str, str] | None = None


# --- the facts -----------------------------------------------------------------------------------------------------


def config(folder: Path | str, revision: str | None = None, load_format: str = "auto", **more: Any) -> Any:
    shape = {
        **MODEL,
        "_name_or_path": str(folder),
        "text_config": {"_name_or_path": str(folder)},
        **more.pop("shape", {}),
    }
    model = {
        "model": str(folder),
        "revision": revision,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "max_model_len": 2048,
        "hf_config": SimpleNamespace(to_dict=lambda: shape),
        "hf_text_config": SimpleNamespace(**shape),
        **more,
    }
    load = SimpleNamespace(load_format=load_format, download_dir=more.pop("download_dir", None))
    return SimpleNamespace(model_config=SimpleNamespace(**model), load_config=load)


def test_one_model_under_two_paths(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", drawn()), write(tmp_path / "b", drawn(), files=4)
    assert facts_of(config(a), Config()) == facts_of(config(b), Config())


def test_another_version_under_one_path(tmp_path: Path) -> None:
    before = facts_of(config(write(tmp_path / "a", drawn())), Config())
    after = facts_of(config(write(tmp_path / "a", drawn(1))), Config())
    assert {name for name in before if before[name] != after[name]} == {"weights"}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"dtype": "torch.float16"}, "dtype"),
        ({"quantization": "fp8"}, "quantisation"),
        ({"quantization_config": Layers(ignore=["lm_head"])}, "quantisation"),
        ({"quantization_config": {"targets": {"*.mlp.*": "fp8_per_tensor"}}}, "quantisation"),
        ({"shape": {"rope_theta": 5.0}}, "config"),
        ({"load_format": "dummy"}, "weights"),
    ],
)
def test_what_else_counts(tmp_path: Path, more: dict[str, Any], name: str) -> None:
    folder = write(tmp_path / "a", drawn())
    one, other = facts_of(config(folder), Config()), facts_of(config(folder, **more), Config())
    assert {n for n in one if one[n] != other[n]} == {name}


def test_the_longest_prompt_chooses_the_factors_of_a_long_rope(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", drawn())
    rope = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}
    found = [facts_of(config(folder, shape=rope, max_model_len=n), Config()).get("rope") for n in (4096, 8192)]
    assert found == ["short", "long"]
    assert "rope" not in facts_of(config(folder), Config())


def test_quantisation_of_single_layers(tmp_path: Path) -> None:
    """The same for all engines that are told the same, in whichever form, and another for each other choice."""
    folder = write(tmp_path / "a", drawn())
    chosen: list[Any] = [
        *(Layers(ignore=["*.o_proj"]) for _ in range(2)),
        Layers(ignore=["*.q_proj"]),
        Layers(linear="fp8_per_tensor"),
        Layers(linear="fp8_per_block"),
        Layers(targets={"*.mlp.*": "fp8_per_block"}),
    ]
    found = [facts_of(config(folder, quantization="online", quantization_config=one), Config()) for one in chosen]
    assert found[0] == found[1] and len({check(facts)["quantisation"] for facts in found}) == len(chosen) - 1


@pytest.mark.parametrize("said", [None, True, False])
def test_the_longest_prompt_chooses_how_llama_4_attends(tmp_path: Path, said: bool | None) -> None:
    """Unless the generation config says it. Which process has loaded the model, and so has set it in its configuration, does not matter."""
    folder = write(tmp_path / "a", drawn())

    def fact(longest: int, set_by_loading: bool | None) -> dict[str, str]:
        shape: dict[str, Any] = {"model_type": "llama4_text"}
        if set_by_loading is not None:
            shape |= {"attn_temperature_tuning": set_by_loading, "max_model_len": longest}
        more = {"override_generation_config": {} if said is None else {"attn_temperature_tuning": said}}
        generation = {"try_get_generation_config": lambda: {"temperature": 0.5}}
        return facts_of(config(folder, shape=shape, max_model_len=longest, **more, **generation), Config())

    found = [fact(n, None) for n in (32768, 32769)]
    assert [one.get("attention") for one in found] == [
        "scaled by temperature" if way else None for way in ((said, said) if said is not None else (False, True))
    ]
    assert found == [fact(n, n > 32768) for n in (32768, 32769)]


def test_a_name_of_one_s_own_stands_for_the_weights(tmp_path: Path) -> None:
    named = Config.from_mapping({"model": "policy-v3"})
    one = facts_of(config(write(tmp_path / "a", drawn())), named)
    assert one == facts_of(config(write(tmp_path / "b", drawn(1))), named) == facts_of(config("s3://bucket/c"), named)
    assert one["model"] == "policy-v3" and "weights" not in one


def test_a_model_of_the_hub_is_what_was_downloaded_for_its_name(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    write(tmp_path / "models--org--model" / "snapshots" / commit, drawn())
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text(commit)
    asked = config("org/model")
    asked.load_config.download_dir = str(tmp_path)
    assert facts_of(asked, Config()) == facts_of(config(write(tmp_path / "a", drawn())), Config())


@pytest.mark.parametrize("name", ["s3://bucket/model", "org/never-downloaded", "x" * 300])
def test_weights_that_cannot_be_found(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    asked = config(name, revision="v1")
    asked.load_config.download_dir = str(tmp_path)
    with caplog.at_level(logging.WARNING):
        facts = facts_of(asked, Config())
    assert facts["revision"] == "v1" and "model" in facts and "weights" not in facts
    assert check(facts) == facts
    assert "cannot be read" in caplog.text and "'model'" in caplog.text


def test_tensors_that_lie_elsewhere_than_the_model(tmp_path: Path) -> None:
    """``--load-format tensorizer``: only the configuration is in the model's path."""
    folder, uris = write(tmp_path / "a", drawn()), [tmp_path / name / "model.tensors" for name in "xyz"]
    for uri, content in zip(uris, (b"one" * 4000, b"two" * 4000, b"one" * 4000), strict=True):
        uri.parent.mkdir()
        uri.write_bytes(content)

    def found(told: Any) -> str:
        asked = config(folder, load_format="tensorizer")
        asked.load_config.model_loader_extra_config = told
        facts = facts_of(asked, Config())
        return facts.get("weights") or facts["model"]

    one, other, again = (found({"tensorizer_config": {"tensorizer_uri": str(uri)}}) for uri in uris)
    assert one == again == found(SimpleNamespace(tensorizer_uri=str(uris[0]))) and one != other
    assert found({"tensorizer_config": {"tensorizer_uri": "s3://a/b.tensors"}}) == "s3://a/b.tensors"


def test_weights_that_were_changed_in_place(tmp_path: Path) -> None:
    first = facts_of(config(tmp_path, load_format="dummy"), Config())
    second, third = updated(first), updated(updated(first))
    assert len({f["updates"] for f in (first, second, third)}) == 3
    assert {**second, "updates": ""} == {**first, "updates": ""}


# --- engines -------------------------------------------------------------------------------------------------------


def card(e: PlayedEngine, security: Security, seconds: float = 30.0) -> m.EngineDescriptor | None:
    """What an engine's directory says to whoever comes with this key."""
    hub = sockets.ControlSockets(security)
    try:
        asked = hub.dial(sockets.address(e.address.host, e.address.port), None, m.MAX_BYTES)
        asked.send(m.Lookup(m.PROTOCOL))
        until = time.monotonic() + seconds
        while (frame := asked.receive()) is None and asked.lost is None and time.monotonic() < until:
            hub.flush()
            hub.poll(0.05)
        found = m.decode(frame) if frame is not None else None
        return found if isinstance(found, m.EngineDescriptor) else None
    finally:
        hub.close()


def test_workers_and_directory_state_the_same(make: Make) -> None:
    e = make(ranks=2)
    stated = ours(e.scheduler.connector)._sched.side.facts
    assert stated["weights"] == "dummy"
    assert [agent.facts for agent in e.agents] == [stated, stated]


def loaded(p: PlayedEngine, d: PlayedEngine, seed: int) -> tuple[int, list[int]]:
    """How many tokens D computed of a prompt that P prefilled, and what it answered."""
    text = prompt(60, seed=seed)
    a = p.add(text, OFFER, n=1)
    p.run(until=a)
    b = d.add(text, p.done[a].params, n=4)
    d.run(p, until=b)
    p.lease_ends()
    assert d.done[b].tokens == answer(text, 4)
    return d.computed[b], d.done[b].tokens


def reset(e: PlayedEngine) -> None:
    """What vLLM does around an update of weights in place."""
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    e.step()


def test_an_update_in_place_makes_another_engine(make: Make) -> None:
    p, d = make(), make()
    assert loaded(p, d, seed=1)[0] == 1 + 3
    reset(p)
    assert [agent.facts["updates"] for agent in p.agents] == ["1"]
    assert loaded(p, d, seed=2)[0] == 60 + 3, "D took what was computed with other weights"
    reset(d)
    assert loaded(p, d, seed=3)[0] == 1 + 3


def test_what_was_offered_before_an_update_is_withdrawn(make: Make) -> None:
    p, d = make(), make()
    text = prompt(60)
    a = p.add(text, OFFER, n=1)
    p.run(until=a)
    reset(d)
    assert not p.scheduler.reset_prefix_cache(reset_connector=True), "blocks are in use: vLLM wants to be asked again"
    p.steps(3)
    assert p.agents[0].revoked and p.agents[0].facts["updates"] == "0"
    reset(p)
    assert p.agents[0].facts == d.agents[0].facts
    b = d.add(text, p.done[a].params, n=4)
    d.run(p, until=b)
    assert d.computed[b] == 60 + 3, "D took what is of the old weights"
    assert loaded(p, d, seed=4)[0] == 1 + 3


def test_what_was_asked_for_before_an_update_is_not_loaded_after_it(make: Make) -> None:
    p, d = make(), make(seqs=1)
    text = prompt(60)
    a = p.add(text, OFFER, n=1)
    p.run(until=a)
    first = d.add(prompt(30, seed=5), n=40)
    d.step()
    b = d.add(text, p.done[a].params, n=4)  # waits behind the first
    d.step()
    reset(d)
    d.run(p, until=b)
    assert first in d.done and d.computed[b] == 60 + 3
    p.lease_ends()


def test_a_directory_takes_the_key_and_states_the_facts(make: Make, tmp_path: Path) -> None:
    key = tmp_path / "key"
    make_key(key)
    e = make(extra={"key_file": str(key)})
    half = ours(e.scheduler.connector)._sched
    half.side.directory.publish(
        (m.RankDescriptor("tcp://127.0.0.1:1", 1, Cache((), (), ()), ("zmq",)),)
    )  # the played one is none
    told = card(e, Security.of(Config(key_file=str(key))))
    assert told is not None and told.facts == half.side.facts
    assert card(e, OPEN, 1.0) is None, "whoever has no key is told the addresses of all ranks"
