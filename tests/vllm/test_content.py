"""The page of what KV depends on, against what vLLM itself hashes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require

require("vllm")

from vllm.config import LoRAConfig, MultiModalConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.sched.output import NewRequestData  # noqa: E402
from vllm.v1.worker import gpu_input_batch, gpu_model_runner  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "content.md").read_text()
INPUTS, STATES = (
    [line for line in part.splitlines() if line.startswith("| ")][1:]
    for part in PAGE.split("## What is left besides KV")
)
TABLE = INPUTS
KEPT = set(re.findall(r"`(\w+)`", "\n".join(STATES)))
NAMED = set(re.findall(r"`(\w+)", "\n".join(TABLE)))
ELSEWHERE = set(re.findall(r"`(\w+)`", PAGE.split("These inputs", 1)[1].split("##", 1)[0]))
"""Inputs that the page says do not count."""

INERT = {
    "lora_int_id": "vLLM's number for an adapter",
    "base_model_name": "for answers",
    "load_inplace": "when to load, not what",
    "tensorizer_config_dict": "where 0.31 finds the weights, which are hashed themselves",
    "data": "what of `mm_features` is hashed",
    "modality": "the kind of an item",
}


def read(function: Callable[..., Any], of: Iterable[str]) -> set[str]:
    """The attributes that a function reads of variables of these names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in of
    }


def called(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The functions of the same module that it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    found = [getattr(inspect.getmodule(function), name, None) for name in sorted(names)]
    return [one for one in found if inspect.isfunction(one) and one.__module__ == function.__module__]


def test_what_vllm_s_block_hash_takes_is_in_the_table() -> None:
    keys = kv_cache_utils.generate_block_hash_extra_keys
    taken = set().union(*(read(f, ("request", "lora_request", "mm_feature", "feature")) for f in [keys, *called(keys)]))
    taken = {name for name in taken if not name.startswith("_")}
    assert {"cache_salt", "lora_request", "mm_features", "prompt_embeds"} <= taken, (
        "this test no longer reads vLLM's hash"
    )
    assert taken <= NAMED, f"vLLM's block hash takes {sorted(taken - NAMED)}, which docs/content.md lacks"


@pytest.mark.parametrize("config", [MultiModalConfig, LoRAConfig])
def test_what_vllm_s_configurations_hash_is_on_the_page(config: Any) -> None:
    taken = read(config.compute_hash, ("self",))
    assert taken and taken <= NAMED | ELSEWHERE, f"docs/content.md lacks {sorted(taken - NAMED - ELSEWHERE)}"


def test_what_adapters_and_media_of_requests_have_is_on_the_page() -> None:
    fields = {*LoRARequest.__struct_fields__, *MultiModalFeatureSpec.__dataclass_fields__}
    assert fields <= NAMED | ELSEWHERE | INERT.keys(), f"lacks {sorted(fields - NAMED - ELSEWHERE - INERT.keys())}"


BOOKKEEPING = {
    *("req_id", "requests", "req_id_to_index", "index_to_req_id", "free_indices", "num_reqs", "device", "vocab_size"),
    *("max_num_reqs", "max_model_len", "max_num_batched_tokens", "num_speculative_steps", "num_computed_tokens_np"),
    *("shared_kv_cache_layers", "encoder_timing_registry", "num_accepted_tokens_event", "layer_to_kv_cache_group_idx"),
}
"""What runners keep for a request, or of layers, that no prompt leaves behind."""


def assigned(function: Callable[..., Any]) -> dict[str, str]:
    """The attributes of ``self`` that a method makes, with their annotations."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = {}
    for node in ast.walk(tree):
        for at in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(at, ast.Attribute) and isinstance(at.value, ast.Name) and at.value.id == "self":
                found[at.attr] = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
    return found


def test_what_vllm_s_runners_keep_of_a_request_is_on_the_page() -> None:
    """A release that keeps something new is looked at before its prompts are moved."""
    second = ROOT / Path(gpu_model_runner.__file__).parent / "gpu" / "states.py"
    scope: dict[str, Any] = {}
    tree = next(n for n in ast.parse(second.read_text()).body if isinstance(n, ast.ClassDef))
    begins = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    for node in ast.walk(begins):
        at = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(at, ast.Attribute):
            scope[at.attr] = None
    runner = assigned(gpu_model_runner.GPUModelRunner.__init__)
    by_name = {name for name, kind in runner.items() if kind.startswith("dict[str,")}
    first = set(gpu_input_batch.CachedRequestState.__dataclass_fields__)
    assert {"mrope_positions", "pooling_states"} <= first and "encoder_cache" in by_name and "prompt_len" in scope
    kept = first | by_name | scope.keys() | set(NewRequestData.__dataclass_fields__)
    assert kept <= KEPT | BOOKKEEPING, f"docs/content.md lacks {sorted(kept - KEPT - BOOKKEEPING)}"


def test_every_row_names_a_test() -> None:
    for row in [*INPUTS, *STATES]:
        tests = re.findall(r"`(tests/\S+\.py)`", row)
        assert tests and all((ROOT / test).is_file() for test in tests), row
