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

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "content.md").read_text()
TABLE = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
NAMED = set(re.findall(r"`(\w+)", "\n".join(TABLE)))
ELSEWHERE = set(re.findall(r"`(\w+)`", PAGE.split("These inputs", 1)[1].split("##", 1)[0]))
"""Inputs that the page says do not count."""

INERT = {
    "lora_int_id": "vLLM's number for an adapter",
    "base_model_name": "for answers",
    "load_inplace": "when to load, not what",
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


def test_every_row_names_a_test() -> None:
    for row in TABLE[1:]:
        tests = re.findall(r"`(tests/\S+\.py)`", row)
        assert tests and all((ROOT / test).is_file() for test in tests), row
