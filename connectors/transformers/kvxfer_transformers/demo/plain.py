"""What one process alone generates for a case."""

from __future__ import annotations

import functools
from typing import Any

from kvxfer_transformers.demo.cases import OUTPUT_TOKENS, Case

__all__ = ["plain_tokens"]


def plain_tokens(case: Case) -> list[list[int]]:
    """Return the ids that ``generate()`` produces after each prompt."""
    batch = case.batch()
    made = _model(case.kind, case.dtype).generate(**batch, max_new_tokens=OUTPUT_TOKENS, do_sample=False)
    tokens: list[list[int]] = made[:, batch["input_ids"].shape[1] :].tolist()
    return tokens


@functools.lru_cache(maxsize=1)
def _model(kind: str, dtype: str) -> Any:
    return Case(kind, (1,), dtype).model()
