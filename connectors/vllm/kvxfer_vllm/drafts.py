"""Layers of a draft model (EAGLE, MTP, a smaller model), beside those of the model that is served.

Their caches decide how many guesses are right, never which tokens come out. So an engine that has a draft model does without
what the other has not computed for it, and lets be what the other has for its own: only two engines with the same draft model
move its cache. vLLM marks such layers nowhere that a connector could see; it counts them on from the layers of the model
served, or calls them ``draft_model``. One that is called otherwise counts as the model's, and both engines must have it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["draft_of"]


def draft_of(layer: str, config: VllmConfig) -> str:
    """Return a text for the draft model that a layer belongs to, the same for the same model.

    Empty for a layer of the model that is served.
    """
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
