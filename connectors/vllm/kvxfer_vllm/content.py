"""What the KV of one request depends on, as a digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.identity import digest
from kvxfer_vllm import compat
from kvxfer_vllm.adapters import Adapters
from kvxfer_vllm.hashing import content_hash
from kvxfer_vllm.media import Media

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["RequestContent"]


class RequestContent:
    """Tells what the KV of one engine's requests depends on: tokens, adapter, media, salt and embeddings, each by content."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.adapters = Adapters(vllm_config)
        self._media = Media(vllm_config)
        self._salts: dict[str, str | None] = {}  # what requests came with, whose salt is now another

    def arrived(self, request: Request) -> None:
        """Have vLLM cache and find a prompt's blocks under the weights that its adapter has now, not under its name alone.

        vLLM's own keys have the name, and would find blocks of other weights if the adapter was loaded again.
        """
        adapter = request.lora_request
        suffix = None if adapter is None else self.adapters.cached_under(adapter)
        if suffix is not None:
            self._salts[request.request_id] = request.cache_salt
            request.cache_salt = f"{request.cache_salt or ''} {suffix}"
            request.block_hashes.clear()
            request.update_block_hashes()

    def digest(self, request: Request, model: str, tokens: int | None = None) -> bytes:
        """Return the digest of a request's prompt, or of its first ``tokens`` tokens with whatever media begin among them.

        Args:
            request: The request.
            model: A hash of the engine's facts.
            tokens: How many tokens of the prompt to cover; None for all.

        Raises:
            KvxferError: Something that its KV depends on is not known by content.
        """
        name, embeds, adapter = request.request_id, request.prompt_embeds, request.lora_request
        lora = None if adapter is None else self.adapters.content(name, adapter)
        begun = [f for f in request.mm_features or () if tokens is None or f.mm_position.offset < tokens]
        media = [(self._media.content(f), f.mm_position.offset, f.mm_position.length) for f in begun]
        is_token = getattr(request, "prompt_is_token_ids", None)
        found = digest(
            tokens=_first(request.prompt_token_ids, tokens),
            model=model,
            media=media,
            lora=lora,
            salt=self._salts.get(name, request.cache_salt),
            embeds=None if embeds is None else _embeds(embeds[:tokens], _first(is_token, tokens)),
        )
        if name in self._salts and not compat.TELLS_ARRIVALS:
            raise KvxferError(
                "its adapter was loaded again, and this vLLM may have cached blocks of its earlier weights"
            )
        if name in self._salts and media and self.adapters.change_media:
            raise KvxferError(
                "its adapter, which was loaded again, changes how its media are encoded, and vLLM may have cached them as before"
            )
        return found

    def finished(self, request: str) -> None:
        """Forget a request."""
        self.adapters.finished(request)
        self._salts.pop(request, None)

    def __len__(self) -> int:
        """Return how much is remembered of requests."""
        return len(self.adapters) + len(self._salts)


def _embeds(tensor: torch.Tensor, is_token: Sequence[bool] | None) -> bytes:
    """Return a hash of prompt embeddings, and of which positions they stand for if there are token ids, too."""
    return content_hash(tensor, None if is_token is None else np.asarray(is_token, bool)).encode()


def _first(items: list[Any] | None, count: int | None) -> list[Any] | None:
    return items if items is None or count is None else items[:count]
