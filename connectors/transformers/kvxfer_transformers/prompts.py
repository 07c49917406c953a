"""Prompts as callers give them: ids, and for ``generate()`` a mask with padding on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvxfer.errors import ArgumentError
from kvxfer_transformers.layers import UnsupportedCacheError

__all__ = ["padding", "prompt_ids", "token_ids"]


def token_ids(name: str, ids: Any) -> torch.Tensor:
    """Return ids as int64 [batch, tokens] on the CPU.

    Raises:
        ArgumentError: ``ids`` is not such a tensor.
    """
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel() or ids.dtype.is_floating_point:
        shown = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ArgumentError(f"{name} must be a tensor of token ids, [batch, tokens], not {shown}")
    return ids.detach().cpu().long()


def prompt_ids(ids: Any) -> list[int]:
    """Return the ids of one prompt.

    Raises:
        ArgumentError: ``ids`` is not a row of integers.
    """
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not ids or not all(type(token) is int for token in ids):
        raise ArgumentError("input_ids must be the ids of one prompt, a row of integers")
    return list(ids)


def padding(mask: Any, ids: torch.Tensor) -> Sequence[int]:
    """Return how many columns of padding each row has, all on the left.

    Args:
        mask: The attention mask of the prompt, [batch, tokens] of 0 and 1; it may be shorter than ``ids``, whose further
            columns were generated. ``None`` if nothing is padded.
        ids: The ids, [batch, tokens].

    Raises:
        ArgumentError: The mask does not fit the ids.
        UnsupportedCacheError: There is padding elsewhere.
    """
    if mask is None:
        return [0] * len(ids)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or len(mask) != len(ids) or mask.shape[1] > ids.shape[1]:
        shown = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ArgumentError(f"attention_mask must be [batch, tokens] for ids of shape {tuple(ids.shape)}, not {shown}")
    real = mask.detach().cpu() != 0
    if not bool((real[:, 1:] >= real[:, :-1]).all()) or not bool(real[:, -1].all()):
        raise UnsupportedCacheError(
            "a row has padding that is not on its left, where generate() wants it: use a tokenizer with padding_side='left'"
        )
    return [int(n) for n in (~real).sum(1)]
