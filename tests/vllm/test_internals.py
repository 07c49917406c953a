"""What kvxfer touches of vLLM beside its interface for connectors: all of it is in one file, named, and still there."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvxfer_vllm import internals

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "connectors/vllm/kvxfer_vllm"
PAGE = (ROOT / "docs/what-vllm-lacks.md").read_text()
OFFERED = (
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.distributed.parallel_state",
    "vllm.platforms",
    "vllm.tracing",
    "vllm.utils.network_utils",
    "vllm.v1.request",
)
"""The modules of vLLM's interface for connectors, and those of which vLLM's own connectors, too, take helpers."""
GIVEN = {
    *("compilation_config", "parallel_config", "data_parallel_size", "kv_transfer_config", "lora_config"),
    *(
        "request_id",
        "cache_salt",
        "max_tokens",
        "num_prompt_tokens",
        "prompt_token_ids",
        "num_computed_tokens",
        "block_hashes",
    ),
    *("kv_cache_spec", "block_size", "head_size", "head_size_v", "num_kv_heads", "sliding_window"),
    *("blocks", "get_block_ids", "finished_recving", "lora_int_id", "rank", "free"),
}
"""Names of what inner parts have and every connector is given: configuration, requests, specs, tables, outputs, ranks."""
PYTHON = {
    "_getframe",
    "put_nowait",
    "Queue",
    "queue",
    "f_back",
    "f_locals",
    "f_globals",
    "get",
    "items",
    "values",
    "clear",
    "index",
    "add",
    "wraps",
    "startswith",
}
OTHERS = {"kv_cache_manager", "shape", "dtype", "_is_amx_tile_supported", "_is_avx512_bf16_supported"}
"""Names of torch's and of kvcached's."""


def used(node: ast.AST) -> set[str]:
    """The names of all attributes that code reads, in any way, but for those that it gives to objects itself."""
    inner = list(ast.walk(node))
    asked = (
        call.args[1]
        for call in inner
        if isinstance(call, ast.Call) and called(call) in ("getattr", "hasattr", "setattr")
    )
    names = {name.value for name in asked if isinstance(name, ast.Constant)}
    names |= {each.attr for each in inner if isinstance(each, ast.Attribute) and not own(each.value)}
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}


def needed() -> set[str]:
    """The names of all that touches need."""
    needs = (need.partition(":")[2] for touch in internals.TOUCHES.values() for need in touch.needs)
    return {name for need in needs for name in need.split(".")}


def called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def imported(tree: ast.Module) -> set[str]:
    """The modules that are imported when the code runs, not only for its types."""
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return froms | {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}


@pytest.mark.parametrize("name", internals.TOUCHES)
def test_vllm_still_has_what_a_touch_needs(name: str) -> None:
    assert internals.changed().get(name, []) == []
    assert f"`{name}`" in PAGE, "the page says which hook vLLM would need instead"


def test_a_release_that_changed_it_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = internals.Touch(("vllm.v1.request:Request.num_eggs", "vllm.no_such:x"), "")
    monkeypatch.setitem(internals.TOUCHES, "lost", lost)
    assert internals.changed() == {"lost": list(lost.needs)}


def test_a_release_without_sources_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(what: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", gone)
    monkeypatch.setitem(internals.TOUCHES, "lost", internals.Touch(("vllm.v1.request:Request.num_eggs",), ""))
    assert internals.changed() == {"lost": ["vllm.v1.request:Request.num_eggs"]}


def test_what_another_library_wraps_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    def around(init: Callable[..., None]) -> Callable[..., None]:
        def patched(
            self: object, *args: object, **options: object
        ) -> None:  # as kvcached does it, without functools.wraps
            init(self, *args, **options)

        return patched

    monkeypatch.setattr(KVCacheCoordinator, "__init__", around(around(KVCacheCoordinator.__init__)))
    assert internals.changed() == {}


@pytest.mark.parametrize("tokens", [2, 16, 17, 32])
def test_a_prompt_without_its_last_token_hashes_as_the_shorter_one(tokens: int) -> None:
    """A block that ended with that token ends with the answer's first, and must not be found by the longer prompt."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    prompt = list(range(tokens))
    one, other = (
        Request("r", text, SamplingParams(max_tokens=1), None, block_hasher=hasher) for text in (prompt, prompt[:-1])
    )
    internals.leave_last_token(one)
    assert one.block_hashes == other.block_hashes
    assert (one.num_tokens, list(one.all_token_ids)) == (other.num_tokens, list(other.all_token_ids))
    assert prompt == list(range(tokens)), "other samples have the same list"


def test_inner_parts_are_touched_in_one_file() -> None:
    """No other imports what is no connector's, reads what is private, or reads frames."""
    found = []
    for file in ROOM.rglob("*.py"):
        if file.name == "internals.py" or file.parent.name == "demo":
            continue
        tree = ast.parse(file.read_text())
        found += [(file.name, name) for name in used(tree) - OTHERS - GIVEN if name.startswith("_") or name in needed()]
        found += [
            (file.name, module)
            for module in imported(tree)
            if module.split(".")[0] == "vllm" and not module.startswith(OFFERED)
        ]
    assert not found


def test_a_touch_names_all_that_it_needs() -> None:
    """Or else nobody is told of a release that has changed it."""
    ours = {name for kind in (internals.Layer, internals.EngineQueue) for name in dir(kind)} | {
        "of",
        "model",
        *internals.TOUCHES,
    }
    missing = {
        node.name: unnamed
        for node in ast.parse((ROOM / "internals.py").read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.name in internals.TOUCHES
        and (unnamed := used(node) - needed() - ours - GIVEN - PYTHON - OTHERS)
    }
    assert not missing
