"""What computing a prompt leaves in an engine beside its KV, and which requests therefore load nothing, or take no part at all.

Almost all of it an engine derives from the request itself. ``docs/content.md`` lists what there is, and what becomes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["Beside", "computed_anyway"]

DERIVED = ("image", "audio")
"""Media whose positions follow from the request, in models that prune videos, too."""


class Beside:
    """What requests of one engine leave beside KV that is neither derived nor moved."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        model, drafts = vllm_config.model_config, getattr(vllm_config, "speculative_config", None)
        rate = getattr(getattr(model, "multimodal_config", None), "video_pruning_rate", None)
        self._prunes = bool(rate and getattr(model, "uses_mrope", False))
        self._collects = getattr(drafts, "method", None) == "extract_hidden_states"

    def no_part(self, request: Request) -> str | None:
        """Return why nobody may compute on from a request's KV, nor the request on others'; None if they may."""
        kinds = {item.modality for item in request.mm_features or ()}
        if self._prunes and not kinds <= set(DERIVED):
            return "the positions behind a video that is pruned are known only where the video was encoded (--video-pruning-rate)"
        if getattr(request, "pooling_params", None) is not None:
            return "what is pooled of its prompt is known only where the prompt is computed"
        return None

    def no_load(self, request: Request) -> str | None:
        """Return why a request computes its whole prompt; None if it may load."""
        if (why := self.no_part(request)) is not None:
            return why
        if request.skip_reading_prefix_cache:
            return (
                "its whole prompt has to be computed, for log probabilities of its tokens or because it asks for that"
            )
        if self._collects:
            return "hidden states of its prompt are collected, and are known only where the prompt is computed"
        return None


def computed_anyway(vllm_config: VllmConfig) -> int:
    """Return how many tokens at the end of a prompt every engine computes itself: the last one, for its logits.

    Of several MTP modules, all but the first write KV of drafts for the last tokens of the producer's prompt, which it never verifies.
    """
    lookahead: Any = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
    return max(1, int(lookahead) - 1)
