"""The facts on which all KV of a vLLM engine depends, and which other engines compare with theirs (see ``kvxfer.facts``).

Weights are identified by content, not by name: one model may be mounted under two paths, and a path may hold another version
after an upgrade. Name and revision count only if the files cannot be found. Adapters are not included: each request has
its own (see ``content.py``).
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer.config import Config
from kvxfer.facts import MAX_TEXT, settings_hash
from kvxfer.logs import logger
from kvxfer_vllm.content.hashing import fingerprint
from kvxfer_vllm.pages.forms import dtype_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logger("kvxfer.vllm")

_UNESSENTIAL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures_path")
"""Fields of a model's configuration that do not affect its KV, or that are facts of their own."""
_SET_BY_LOADING = ("attn_temperature_tuning", "max_model_len", "num_ln_in_parallel_attn")
"""Fields that models set while they are loaded, by other fields or by settings. If a worker has a process of its own, only it sees that."""
TUNED_FROM = 32768
"""The ``max_model_len`` above which vLLM has Llama 4 scale its attention by temperature."""


def facts_of(vllm_config: VllmConfig, config: Config) -> dict[str, str]:
    """Return the facts of an engine that has loaded its weights.

    Reads a few MiB of the weights' files, in less than a second.
    """
    model = vllm_config.model_config
    return {
        **_weights(vllm_config, config),
        "config": settings_hash(model.hf_config.to_dict(), without=_UNESSENTIAL + _SET_BY_LOADING),
        **_rope(model),
        **_attention(vllm_config),
        "dtype": dtype_name(model.dtype),
        "quantisation": _quantisation(model),
        "updates": "0",
    }


def updated(facts: dict[str, str]) -> dict[str, str]:
    """Return the facts after one more change of the weights in place."""
    return {**facts, "updates": str(int(facts["updates"]) + 1)}


def _weights(vllm_config: VllmConfig, config: Config) -> dict[str, str]:
    model, load = vllm_config.model_config, vllm_config.load_config
    if config.model is not None:
        return {"model": config.model}
    if load.load_format == "dummy":
        return {"weights": "dummy"}
    name = _tensorized(load) or getattr(model, "model_weights", "") or model.model
    try:
        found = fingerprint(checkpoint(name, model.revision, load.download_dir))
    except (OSError, ValueError) as e:
        log.warning(
            "the weights of %r cannot be read (%s): name and revision are compared with those of other engines instead; set "
            "'model' to the same text on all engines if they know the model by different names",
            name,
            e,
        )
        return {"model": _fitting(name), "revision": _fitting(model.revision or "none")}
    log.info("the weights of %r have the fingerprint %s", name, found)
    return {"weights": found}


def _tensorized(load: Any) -> str | None:
    """Return where the weights are if ``--load-format tensorizer`` takes them from elsewhere than the model's path."""
    if load.load_format != "tensorizer":
        return None
    told = load.model_loader_extra_config
    told = told.get("tensorizer_config", told) if isinstance(told, dict) else vars(told)
    where: str | None = told.get("tensorizer_uri") or told.get("tensorizer_dir")
    return where


def checkpoint(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Return where the files of a model are: its path, or what vLLM has downloaded for its name.

    Raises:
        OSError: They are not on this host.
        ValueError: They are not on this host.
    """
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))


def _rope(model: Any) -> dict[str, str]:
    """Return which of the two sets of LongRoPE factors vLLM uses: it chooses by ``max_model_len``."""
    text = getattr(model, "hf_text_config", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "longrope":
        return {}
    name = "original_max_position_embeddings"
    short = rope.get(name) or getattr(text, name, None) or 0
    return {"rope": "long" if model.max_model_len > short else "short"}


def _attention(vllm_config: VllmConfig) -> dict[str, str]:
    """Return how settings of the engine have tokens attend to each other, where that is not as the model's configuration says."""
    model, ways = vllm_config.model_config, []
    if getattr(getattr(vllm_config, "attention_config", None), "use_non_causal", False):
        ways.append("not causal")
    if getattr(getattr(model, "hf_text_config", None), "model_type", "") == "llama4_text":
        chosen = {**model.try_get_generation_config(), **model.override_generation_config}
        if chosen.get("attn_temperature_tuning", model.max_model_len > TUNED_FROM):
            ways.append("scaled by temperature")
    return {"attention": ", ".join(ways)} if ways else {}


def _quantisation(model: Any) -> str:
    """Return how vLLM quantises the weights that it loads: the method, and a hash of what is set for single layers."""
    method, layers = str(model.quantization or "none"), getattr(model, "quantization_config", None)
    if layers is None:
        return method
    told = dataclasses.asdict(layers) if dataclasses.is_dataclass(layers) and not isinstance(layers, type) else layers
    return f"{method} {settings_hash({'layers': told}, without=())}"


def _fitting(text: str) -> str:
    """Return the text if it is valid as a fact, else a hash of it."""
    if len(text) <= MAX_TEXT and text.isprintable():
        return text
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
