"""Tell the layers of a draft model (EAGLE, MTP, a smaller model) from the layers of the model that is served.

Their caches affect how many drafted tokens are accepted, never which tokens come out. So only two engines with the same
draft model move its cache; an engine whose peer has none, or another, does without. vLLM does not mark such layers for
connectors: it numbers them after the layers of the served model, or names them ``draft_model``. A draft layer with any
other name counts as the served model's, and both engines must have it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["draft_of"]


def draft_of(layer: str, config: VllmConfig) -> str:
    """Return a text that identifies the draft model that a layer belongs to; empty for a layer of the served model."""
    spec = getattr(config, "speculative_config", None)
    draft = getattr(spec, "draft_model_config", None)
    if spec is None or draft is None:
        return ""
    parts = layer.split(".")
    number = next((int(part) for part in parts if part.isdigit()), -1)
    if parts[0] != "draft_model" and number < config.model_config.get_total_num_hidden_layers():
        return ""
    shape = json.dumps(draft.hf_config.to_dict(), sort_keys=True, default=str)
    return f"{spec.method}-{hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()}"
