"""What the KV of one request depends on, as a digest, and what computing its prompt leaves beside KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.identity import digest
from kvxfer_vllm.content.adapters import Adapters
from kvxfer_vllm.content.hashing import content_hash
from kvxfer_vllm.content.media import Media
from kvxfer_vllm.internals import cache_under
from kvxfer_vllm.requests import RequestFacts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

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
        """Return why a request computes its whole prompt though others' KV would do; None if it may load."""
        if request.skip_reading_prefix_cache:
            return (
                "its whole prompt has to be computed, for log probabilities of its tokens or because it asks for that"
            )
        if self._collects:
            return "hidden states of its prompt are collected, and are known only where the prompt is computed"
        return None


class RequestContent:
    """Tells what the KV of one engine's requests depends on: tokens, adapter, media, salt and embeddings, each by content."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.adapters = Adapters(vllm_config)
        self.media = Media(vllm_config)
        self.beside = Beside(vllm_config)

    def arrived(self, facts: RequestFacts) -> None:
        """Have vLLM cache and find a prompt's blocks under the weights that its adapter has now, and learn the names of its media.

        vLLM's own keys have the adapter's name, and would find blocks of other weights if the adapter was loaded again.
        """
        request, adapter = facts.request, facts.request.lora_request
        self.media.note(request.mm_features or ())
        suffix = None if adapter is None else self.adapters.cached_under(adapter)
        if suffix is not None:
            facts.reloaded = True
            cache_under(request, suffix)

    def digest(self, facts: RequestFacts, model: str, tokens: int | None = None) -> bytes:
        """Return the digest of a request's prompt, or of its first ``tokens`` tokens with whatever media begin among them.

        Raises:
            KvxferError: Something that its KV depends on is not known by content.
        """
        request, embeds = facts.request, facts.request.prompt_embeds
        lora, media = self._lora(facts), self._items(request, tokens)
        is_token = getattr(request, "prompt_is_token_ids", None)
        found = digest(
            tokens=_first(request.prompt_token_ids, tokens),
            model=model,
            media=media,
            lora=lora,
            salt=facts.salt,
            embeds=None if embeds is None else _embeds(embeds[:tokens], _first(is_token, tokens)),
        )
        self._check_reloaded(facts, media)
        return found

    def named(self, facts: RequestFacts) -> dict[str, Any] | None:
        """Return what a request's KV depends on besides its tokens and the model, for a ``Prefix``; None if it cannot be named so.

        Call it when the request arrives: later it is not known any more which weights its adapter had, or what its media were.

        Raises:
            KvxferError: Something that its KV depends on is not known by content.
        """
        request = facts.request
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
            return None
        media = self._items(request, None)
        self._check_reloaded(facts, media)
        return {"lora": self._lora(facts), "media": media, "salt": facts.salt}

    def _check_reloaded(self, facts: RequestFacts, media: Sequence[Any]) -> None:
        """Raise if vLLM may have cached something of a request from before its adapter was loaded again."""
        if facts.reloaded and media and self.adapters.change_media:
            raise KvxferError(
                "its adapter, which was loaded again, changes how its media are encoded, and vLLM may have cached them as before"
            )

    def _lora(self, facts: RequestFacts) -> str | None:
        adapter = facts.request.lora_request
        return None if adapter is None else self.adapters.content(facts, adapter)

    def _items(self, request: Request, tokens: int | None) -> list[tuple[str, int, int]]:
        """Return the media that begin among the first tokens."""
        begun = [f for f in request.mm_features or () if tokens is None or f.mm_position.offset < tokens]
        return [(self.media.content(f), f.mm_position.offset, f.mm_position.length) for f in begun]


def _embeds(tensor: torch.Tensor, is_token: Sequence[bool] | None) -> bytes:
    """Return a hash of prompt embeddings, and of which positions they stand for if there are token ids, too."""
    return content_hash(tensor, None if is_token is None else np.asarray(is_token, bool)).encode()


def _first(items: list[Any] | None, count: int | None) -> list[Any] | None:
    return items if items is None or count is None else items[:count]
