"""How towers and processors work is part of what an image is, wherever the checkpoint lies."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer_vllm.content.hashing import content_hash
from kvxfer_vllm.content.media import FILES, Media


def item(value: Any) -> Any:
    return SimpleNamespace(
        data={"pixels": SimpleNamespace(data=value)},
        modality="image",
        identifier="a",
        mm_position=SimpleNamespace(length=4),
    )


class Item(dict[str, Any]):
    """One to which there are weak references."""


def content(folder: Path, **settings: Any) -> str:
    model = SimpleNamespace(model=str(folder), revision=None, multimodal_config=SimpleNamespace(**settings))
    config: Any = SimpleNamespace(model_config=model, load_config=SimpleNamespace(download_dir=None))
    feature = item(torch.ones(3, 4))
    feature.data = Item(feature.data)
    return Media(config).content(feature)


def checkpoint(folder: Path, **files: Any) -> Path:
    folder.mkdir()
    for name, settings in files.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
    return folder


def test_one_checkpoint_at_two_paths(tmp_path: Path) -> None:
    settings = {"preprocessor_config": {"size": 4, "do_normalize": True}}
    one, other = (content(checkpoint(tmp_path / name, **settings)) for name in "ab")
    assert one == other


@pytest.mark.parametrize("name", FILES)
def test_another_configuration_of_a_processor(tmp_path: Path, name: str) -> None:
    stem = name.removesuffix(".json")
    found = {content(checkpoint(tmp_path / str(i), **{stem: {"do_normalize": bool(i)}})) for i in range(2)}
    assert len(found) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_kwargs": {"size": 8}},
        {"mm_device_do_normalize": True},
        {"video_pruning_rate": 0.5},
        {"video_pruning_method": "vidcom2"},
        {"mm_encoder_attn_dtype": "fp8"},
    ],
)
def test_another_setting_of_towers(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "a")
    assert content(folder) != content(folder, **settings)


def test_scales_are_known_by_content(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", one={"q": 1.0}, same={"q": 1.0}, other={"q": 2.0})
    one, same, other = (
        content(folder, mm_encoder_fp8_scale_path=str(folder / f"{n}.json")) for n in ("one", "same", "other")
    )
    assert one == same != other


VALUES: list[Any] = [
    None,
    0,
    False,
    0.0,
    "",
    b"",
    [],
    {},
    [[]],
    [0, 0],
    [[0], 0],
    {"a": 0},
    ["a", 0],
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.zeros(6),
    torch.zeros(2, 3, dtype=torch.int32),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(3, dtype=torch.float16),
    torch.zeros(0),
    [torch.zeros(1), torch.zeros(1)],
    [torch.zeros(2)],
]


def test_no_two_values_have_one_hash() -> None:
    assert len({content_hash(value) for value in VALUES}) == len(VALUES)
    assert content_hash(torch.zeros(2, 3).t()) == content_hash(torch.zeros(3, 2))
    assert content_hash(np.zeros(3, np.float32)) == content_hash(torch.zeros(3))
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(KvxferError, match="object cannot be compared"):
        content_hash([object()])
