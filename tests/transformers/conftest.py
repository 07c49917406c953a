"""Models and exchanges that all tests of this folder share: a producer and a consumer for each kind of model."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.conftest import require

require("torch")
require("transformers")

import torch  # noqa: E402

from kvxfer_transformers import CacheExchange  # noqa: E402
from kvxfer_transformers.demo.models import VOCAB, tiny  # noqa: E402


class Pair(NamedTuple):
    model: torch.nn.Module
    producer: CacheExchange
    consumer: CacheExchange


@pytest.fixture(scope="package")
def pairs() -> Iterator[functools.partial]:
    """Pairs of exchanges by kind of model and dtype; each is made once. Their offers end with this folder's tests."""
    made: dict[tuple[str, torch.dtype], Pair] = {}

    def pair(kind: str, dtype: torch.dtype = torch.float32) -> Pair:
        if (kind, dtype) not in made:
            model = tiny(kind, dtype)
            made[kind, dtype] = Pair(
                model, CacheExchange(model, name="producer"), CacheExchange(model, name="consumer")
            )
        return made[kind, dtype]

    yield pair
    for _, producer, consumer in made.values():
        consumer.close()
        producer.close()


@pytest.fixture
def full(pairs) -> Pair:
    return pairs("full")


def batch(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids and mask of prompts of these lengths, padded on the left."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (len(lengths), max(lengths)), generator=random)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = ids[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def prefilled(model, prompts: dict[str, torch.Tensor], cache=None, tokens: int = 1):
    return model.generate(
        **prompts, past_key_values=cache, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True
    )


def plain(model, prompts: dict[str, torch.Tensor], tokens: int = 8) -> list[list[int]]:
    return model.generate(**prompts, max_new_tokens=tokens, do_sample=False).tolist()
