"""The facts that all KV of a model depends on, and the digest of what the KV of one prompt depends on.

The weights are identified by what is in memory: their files and names do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from kvxfer.config import Config
from kvxfer.facts import sealed, settings_hash
from kvxfer.identity import digest, key

__all__ = ["model_facts", "prompt_digest"]

SAMPLES = 256
"""The number of elements of each tensor that the fingerprint covers, spread over it. Weights that differ elsewhere look alike."""

_UNESSENTIAL = frozenset(
    "_name_or_path architectures transformers_version torch_dtype dtype use_cache return_dict output_attentions "
    "output_hidden_states attn_implementation bos_token_id eos_token_id pad_token_id".split()
)
"""Settings of a model that its KV does not depend on, and those that are facts of their own."""


def model_facts(model: Any, config: Config) -> dict[str, str]:
    """Return the facts of a model: its weights, configuration (including positions and their scaling) and dtype.

    Reads some elements of each weight, which takes milliseconds for small models and about a second for those of many layers.
    """
    weights = {"weights": _fingerprint(model)} if config.model is None else {"model": config.model}
    return {
        **weights,
        "config": settings_hash(model.config.to_dict(), without=_UNESSENTIAL),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def prompt_digest(model: Any, facts: dict[str, str], tokens: Sequence[int], salt: str | None) -> bytes:
    """Return the digest of what the KV of these tokens depends on, including the adapters that are active now."""
    return digest(tokens=tokens, model=sealed(facts), lora=_adapters(model), salt=salt)


def _fingerprint(model: Any) -> str:
    told = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(model.state_dict().items()):
        if "lora_" in name:
            continue  # adapters are part of each prompt's digest
        flat = weight.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // SAMPLES)].contiguous().cpu()
        told.update(key(name, str(weight.dtype), tuple(weight.shape), flat.view(torch.uint8).numpy().tobytes()))
    return told.hexdigest()


def _adapters(model: Any) -> str | None:
    """Return the names of the adapters that compute KV now; ``None`` without any."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return None
    return ",".join(sorted(model.active_adapters()))
