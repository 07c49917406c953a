"""The demo's cases: models of several kinds, batches with padding, both kinds of cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kvxfer_transformers.demo.models import VOCAB, tiny

__all__ = ["CASES", "OUTPUT_TOKENS", "Case", "plain_tokens"]

OUTPUT_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One batch of prompts of these lengths, with the shorter ones padded on the left.

    ``kind`` is one of ``models.MODELS``. With ``static`` the KV goes into a ``StaticCache``; with ``batching`` continuous batching runs
    the prompts instead of ``generate()``.
    """

    kind: str
    lengths: tuple[int, ...]
    dtype: str = "float32"
    static: bool = False
    batching: bool = False

    def model(self) -> Any:
        """Return the model, the same wherever it is made."""
        return tiny(self.kind, getattr(torch, self.dtype))

    def prompts(self) -> list[list[int]]:
        """Return the ids of each prompt, without padding."""
        batch = self.batch()
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        return [ids[mask.bool()].tolist() for ids, mask in rows]

    def batch(self) -> dict[str, torch.Tensor]:
        """Return ids and mask as ``generate()`` takes them."""
        longest = max(self.lengths)
        random = torch.Generator().manual_seed(sum(self.lengths))
        ids = torch.randint(1, VOCAB, (len(self.lengths), longest), generator=random)
        mask = torch.ones_like(ids)
        for row, length in enumerate(self.lengths):
            mask[row, : longest - length] = ids[row, : longest - length] = 0
        return {"input_ids": ids, "attention_mask": mask}


CASES: dict[str, Case] = {
    "one prompt": Case("full", (300,)),
    "a padded batch": Case("full", (120, 17, 64)),
    "into a StaticCache": Case("full", (120, 17, 64), static=True),
    "bfloat16": Case("full", (90, 31), dtype="bfloat16"),
    "a sliding window": Case("sliding", (100, 21)),
    "windows in some layers": Case("mixed", (100, 21)),
    "a latent (MLA)": Case("latent", (100, 21)),
    "continuous batching": Case("full", (300, 17, 64), batching=True),
    "batching, windows": Case("mixed", (100, 21), batching=True),
}


def plain_tokens(case: Case) -> list[list[int]]:
    """Return the ids that ``generate()`` produces after each prompt."""
    batch = case.batch()
    made = _model(case.kind, case.dtype).generate(**batch, max_new_tokens=OUTPUT_TOKENS, do_sample=False)
    tokens: list[list[int]] = made[:, batch["input_ids"].shape[1] :].tolist()
    return tokens


@functools.lru_cache(maxsize=1)
def _model(kind: str, dtype: str) -> Any:
    return Case(kind, (1,), dtype).model()
