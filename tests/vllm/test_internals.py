"""What kvxfer touches of vLLM beside its interface for connectors: all of it is in one file, named, and still there."""

from __future__ import annotations

import re
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
INNER = re.compile(
    r"_getframe|\bsetattr\(|\.(coordinator|single_type_managers|block_pool|req_to_blocks|static_forward_context|_registry)\b"
    r"|\.(_all_token_ids|update_block_hashes|_load_adapter|add_lora|input_queue|reset_prefix_cache|get_computed_blocks)\b"
)


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
    found = {
        f"{file.relative_to(ROOM)}:{number}"
        for file in ROOM.rglob("*.py")
        if file.name != "internals.py" and file.parent.name != "demo"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if INNER.search(line)
    }
    assert not found
