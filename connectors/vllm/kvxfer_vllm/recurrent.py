"""Recurrent state (Mamba, gated delta nets, short convolutions): which caches of it can be moved, and for how many tokens.

A consumer computes the last prompt token itself, for its logits. Where a cache is a state and not a row of tokens, that is
right only on the state *before* that token; so the producer computes all tokens of the prompt but the last.

Where the state lies: without prefix caching (vLLM's ``mamba_cache_mode`` "none") in a request's first block, which counts as long
as the longest request. With it ("align") it lies in the block of the token that was computed last, as if it were KV. Blocks
before that one are null or hold states of fewer tokens, for vLLM's prefix cache alone. Blocks after it, one for each
draft token, hold what drafts leave behind until they are accepted, of which there is nothing after a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError, KvxferError

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["check_spec", "leave_last_token"]


def check_spec(group: int, spec: Any) -> None:
    """Refuse a spec for which it is not known which block holds the state.

    Raises:
        ConfigError: It is one.
    """
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode not in ("none", "align"):
        raise ConfigError(
            f"kvxfer does not support KV-cache group {group}: it does not know where vLLM keeps recurrent states with "
            f"mamba_cache_mode {mode!r}; set --mamba-cache-mode align, or --no-enable-prefix-caching"
        )


def leave_last_token(request: Request) -> None:
    """Have vLLM compute this prompt without its last token, and no further: the next step would overwrite the state.

    What it answers is of no use to anybody. The prompt has two tokens at least, and cannot grow.

    Raises:
        KvxferError: The state of this prompt cannot be offered.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise KvxferError("a recurrent state is not offered for a prompt of embeddings")
    if request.skip_reading_prefix_cache:
        raise KvxferError("a request that needs its whole prompt computed offers no recurrent state")
    if request.num_output_tokens:
        raise KvxferError("a request that has produced tokens offers no recurrent state")
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # its caller and other samples may have the same list
    del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    del request.block_hashes[-1:]  # which may be of a block that ended with that token, and is to end with another
    request.update_block_hashes()
