"""The facts that all KV of a model depends on, and the digest of what the KV of one prompt depends on.

The weights are identified by what is in memory: their files and names do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvxfer.config import Config
from kvxfer.facts import sealed, settings_hash
from kvxfer.identity import digest, key

__all__ = ["model_facts", "prompt_digests"]

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


def prompt_digests(
    model: Any, facts: dict[str, str], prompts: Iterable[Sequence[int]], salt: str | None
) -> list[bytes]:
    """Return for each prompt the digest of what the KV of its tokens depends on, including the adapters that are active now."""
    whole, adapters = sealed(facts), _adapters(model)
    return [digest(tokens=tokens, model=whole, lora=adapters, salt=salt) for tokens in prompts]


def _fingerprint(model: Any) -> str:
    told = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(model.state_dict().items()):
        if "lora_" in name:
            continue  # adapters are part of each prompt's digest
        told.update(key(name, str(weight.dtype), tuple(weight.shape), _sample(weight).cpu().numpy().tobytes()))
    return told.hexdigest()


def _adapters(model: Any) -> str | None:
    """Return what tells apart the adapters that compute KV now; ``None`` without any.

    Their names do not: unless it is given another, each adapter's name is ``default``. PEFT puts a layer with adapters in place of
    each layer that it changes, and names the attributes that have something for each adapter; the weights are in modules or
    parameters.
    """
    found, samples = [], []
    for name, layer in model.named_modules():
        if not hasattr(layer, "adapter_layer_names") or layer.disable_adapters:
            continue
        for adapter in layer.active_adapters:
            found.append(f"{name} {getattr(layer, 'scaling', {}).get(adapter)}")
            for part in layer.adapter_layer_names:
                held = getattr(layer, part, {})
                if adapter in held:
                    module = held[adapter]
                    weights = [module] if isinstance(module, torch.Tensor) else module.state_dict().values()
                    found += [f"{part} {weight.dtype} {tuple(weight.shape)}" for weight in weights]
                    samples += [_sample(weight) for weight in weights]
    if not samples:
        return None
    content = torch.cat(samples).cpu().numpy().tobytes()  # one copy from the device: this is done for each request
    return hashlib.blake2b(key(*found, content), digest_size=16).hexdigest()


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return the bytes of some elements of a weight, spread over it."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)].contiguous().view(torch.uint8)
