"""Recurrent state (Mamba, gated delta nets, short convolutions): which caches of it can be moved, and for how many tokens.

A consumer computes the last prompt token itself, for its logits. Where a cache is a state and not a row of tokens, that is
right only on the state *before* that token; so the producer computes all tokens of the prompt but the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError, KvxferError

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["check_spec", "encoding", "is_state", "leave_last_token"]


def is_state(spec: Any) -> bool:
    """Whether a layer's cache is a recurrent state; vLLM has one name for all kinds of it."""
    return type(spec).__name__ == "MambaSpec"


def check_spec(group: int, spec: Any) -> None:
    """Refuse what is more than one state for a request. Raises ``ConfigError``."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "none":
        raise ConfigError(
            f"kvxfer does not support KV-cache group {group}: it keeps recurrent states of several prefixes "
            f"(mamba_cache_mode {mode!r}); set --mamba-cache-mode none or --no-enable-prefix-caching"
        )
    if getattr(spec, "num_speculative_blocks", 0):
        raise ConfigError(
            f"kvxfer does not support KV-cache group {group}: speculative decoding beside recurrent state "
            f"keeps {spec.num_speculative_blocks} more states for each request"
        )


def encoding(spec: Any) -> str:
    """All that the bytes of a state depend on: which states it consists of, in this order."""
    states = zip(spec.shapes, spec.dtypes, strict=True)
    parts = [f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}" for shape, dtype in states]
    return f"vllm/state/{getattr(spec.mamba_type, 'name', spec.mamba_type)}/{','.join(parts)}"


def leave_last_token(request: Request) -> None:
    """Have vLLM compute this prompt without its last token, and no further: the next step would overwrite the state. What
    it answers is of no use to anybody. Raises ``KvxferError`` for a prompt of which the state cannot be offered."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise KvxferError("a recurrent state is not offered for a prompt of embeddings")
    if request.num_prompt_tokens < 2:
        raise KvxferError("there is no state before the only token of a prompt")
    if request.skip_reading_prefix_cache:
        raise KvxferError("a request that needs its whole prompt computed offers no recurrent state")
    if request.num_output_tokens:
        raise KvxferError("a request that has produced tokens offers no recurrent state")
    del request.prompt_token_ids[-1]
    del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
