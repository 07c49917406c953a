"""What all KV of an SGLang server depends on, as facts that others compare with theirs; and what one request's depends on."""

from __future__ import annotations

import hashlib
from typing import Any

from kvxfer import Config
from kvxfer.facts import MAX_TEXT, settings_hash
from kvxfer.identity import key

_UNESSENTIAL = frozenset(
    "_name_or_path architectures transformers_version torch_dtype dtype use_cache return_dict output_attentions "
    "output_hidden_states attn_implementation bos_token_id eos_token_id pad_token_id".split()
)
"""Settings of a model that its KV does not depend on, and those that are stated by themselves."""


def server_facts(model: Any, encoding: str, config: Config) -> dict[str, str]:
    """Return the facts of a server, of which ``model`` is SGLang's ``ModelConfig`` and ``encoding`` the KV cache's dtype.

    Its weights are known by the model's name and revision as the server was told them, or by the setting ``model``.
    """
    return {
        "model": config.model or str(model.model_path)[-MAX_TEXT:],
        "revision": str(model.revision or "none")[-MAX_TEXT:],
        "config": settings_hash(model.hf_config.to_dict(), without=_UNESSENTIAL),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": str(model.quantization or "none"),
        "kv dtype": encoding,
    }


def request_digest(room: int, prefix: int, pages: int, weights: str) -> bytes:
    """Return what both servers must mean when they speak of a request.

    SGLang gives its transfers no tokens to compare. A room, ``bootstrap_room``, is the router's name for one request, and both servers
    know it. ``prefix``: tokens that the decode server has cached. ``pages``: how many pages behind those are moved.
    ``weights``: SGLang's name for the weights that the server has now.
    """
    return hashlib.blake2b(key("sglang", room, prefix, pages, weights), digest_size=16).digest()
