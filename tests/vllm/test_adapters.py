"""What an adapter is known by: what a worker has loaded, in vLLM's own classes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from kvxfer_vllm.content.adapters import Adapters, LoadedAdapters, adapter_loaded, loaded_by
from kvxfer_vllm.requests import RequestFacts

ROWS, RANK = 32, 4


def write(folder: Path, seed: int = 0, change: dict[str, Any] | None = None, form: str = "safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = {
        f"base_model.model.layers.{i}.q_proj.lora_{part}.weight": rng.normal(size=shape).astype(np.float32)
        for i in range(2)
        for part, shape in (("A", (RANK, ROWS)), ("B", (ROWS, RANK)))
    }
    if form == "bin":
        torch.save({name: torch.from_numpy(weight) for name, weight in weights.items()}, folder / "adapter_model.bin")
    else:
        save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], **(change or {})}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Worker:
    """One that loads adapters with vLLM's own manager, for a model of which no more is needed than the names of its layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        lora = SimpleNamespace(lora_dtype=dtype, max_lora_rank=64, max_loras=2, bias_enabled=False)
        self.vllm_config = SimpleNamespace(lora_config=lora, parallel_config=SimpleNamespace(world_size=1))
        self.loaded = LoadedAdapters(lora)
        self._manager: Any = WorkerLoRAManager.__new__(WorkerLoRAManager)
        from vllm.lora.lora_model import LoRAModel

        self._manager.lora_config, self._manager._lora_model_cls = lora, LoRAModel
        self._manager.max_position_embeddings, self._manager.vocab_size = 128, 100
        self._manager._adapter_manager = SimpleNamespace(
            supported_lora_modules=["q_proj"],
            packed_modules_mapping={},
            model=torch.nn.Module(),
            moe_ep_load_spec=None,
            _validate_moe_lora_format=lambda adapter: None,
            _validate_modules_to_save=lambda adapter: None,
            _validate_token_classification_lora=lambda adapter: None,
            _validate_classification_head_lora=lambda adapter: None,  # as 0.33 calls the last one
        )

    def load(self, folder: Path, number: int = 1, **more: Any) -> str:
        self._manager._load_adapter(LoRARequest(lora_name="a", lora_int_id=number, lora_path=str(folder), **more))
        return self.loaded.contents[number]


def test_one_adapter_whatever_its_path_and_format(tmp_path: Path) -> None:
    found = {
        Worker().load(write(tmp_path / "a")),
        Worker().load(write(tmp_path / "b"), number=7),
        Worker().load(write(tmp_path / "c", form="bin")),
        Worker().load(write(tmp_path / "d", change={"bias": "none", "task_type": "CAUSAL_LM"})),
    }
    assert len(found) == 1


def test_other_weights_and_other_settings(tmp_path: Path) -> None:
    changes: list[Any] = [{}, {"lora_alpha": 12}, {"use_rslora": True}]
    if "alpha_pattern" in PEFTHelper.__dataclass_fields__:  # 0.31 computes the same with any
        changes.append({"alpha_pattern": {"layers.0.q_proj": 4}})
    found = [Worker().load(write(tmp_path / str(i), change=change)) for i, change in enumerate(changes)]
    found.append(Worker().load(write(tmp_path / "seed", seed=1)))
    found.append(Worker(torch.bfloat16).load(tmp_path / "0"))
    assert len(set(found)) == len(found)


def test_one_number_of_one_weight(tmp_path: Path) -> None:
    """A hash of all of it, not of samples."""
    folder = write(tmp_path / "a")
    before = Worker().load(folder)
    content = bytearray((folder / "adapter_model.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(content)
    assert Worker().load(folder) != before


def test_what_is_known_is_what_was_loaded_not_what_the_files_hold_now(tmp_path: Path) -> None:
    worker = Worker()
    first = worker.load(write(tmp_path / "a"))
    write(tmp_path / "a", seed=1)
    assert worker.loaded.contents == {1: first} and not worker.loaded.replaced
    worker.load(tmp_path / "a")
    assert worker.loaded.contents != {1: first} and worker.loaded.replaced
    assert worker.loaded.take_news() and not worker.loaded.replaced and not worker.loaded.take_news()


def test_workers_of_one_process_are_told_apart(tmp_path: Path) -> None:
    one, other = Worker(), Worker()
    one.load(write(tmp_path / "a"))
    assert not other.loaded.contents and loaded_by(other) == {} and loaded_by(one) == one.loaded.contents


def engine(ranks: int) -> tuple[Any, Adapters]:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks), lora_config=SimpleNamespace())
    return config, Adapters(config)


R, S = RequestFacts("r", 1), RequestFacts("s", 2)
ADAPTER = LoRARequest(lora_name="a", lora_int_id=1, lora_path="/nowhere")


def test_an_adapter_is_unknown_until_every_rank_has_loaded_it() -> None:
    config, adapters = engine(2)
    adapters.learn(0, {1: "x"})
    with pytest.raises(Exception, match="not known"):
        adapters.content(R, ADAPTER)
    adapters.learn(1, {1: "x"})
    both = adapters.content(R, ADAPTER)
    adapters.learn(1, {1: "y"})
    assert adapters.content(S, ADAPTER) != both
    assert adapters.take_replaced() and not adapters.take_replaced()
    assert [adapters.is_same(facts) for facts in (R, S)] == [False, True]
    assert config is not None


def test_an_adapter_whose_loading_was_not_answered_is_unknown() -> None:
    config, adapters = engine(1)
    adapter_loaded(config.lora_config, 1, lambda: [{1: "x"}])
    adapters.content(R, ADAPTER)

    def fails() -> Any:
        raise RuntimeError("the executor failed")

    with pytest.raises(RuntimeError):
        adapter_loaded(config.lora_config, 1, fails)
    with pytest.raises(Exception, match="not known"):
        adapters.content(R, ADAPTER)


def test_adapters_of_another_engine_are_not_ours() -> None:
    config, _ = engine(1)
    _, other = engine(1)
    adapter_loaded(config.lora_config, 1, lambda: [{1: "x"}])
    with pytest.raises(Exception, match="not known"):
        other.content(R, ADAPTER)
