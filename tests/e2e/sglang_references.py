"""What SGLang's CPU device lacks for latents, windows and short convolutions, in plain torch.

Its attention in torch looks for a window's keys at the places of full attention, which are those of another pool, and knows no sinks,
not even that there are none. For latents SGLang gives it keys that are not what the pool holds, where the absorbed way would do. Short
convolutions are kernels of Triton alone. All else of these layers is SGLang's: weights, pools, states and their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.mamba import causal_conv1d
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from torch.nn.functional import conv1d

Tensor = torch.Tensor


def _in_the_windows_pool(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the attention that finds the keys of a window in the window's own pool."""

    def attend_there(
        backend: Any, q: Tensor, out: Tensor, k: Tensor, v: Tensor, places: Tensor, *given: Any, **more: Any
    ) -> Tensor:
        if backend.use_sliding_window_kv_pool and more["sliding_window_size"] is not None:
            places = backend.token_to_kv_pool.translate_loc_from_full_to_swa(places)
        return attend(backend, q, out, k, v, places, *given, **more)

    return attend_there


def _without_sinks(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the step that may be told that there are no sinks, as MiMo's layers tell it."""

    def step(*given: Any, sinks: None = None, **more: Any) -> Tensor:
        assert sinks is None
        return forward(*given, **more)

    return step


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, **m: Any) -> Tensor:
    """``causal_conv1d_fn``, without an activation: prompts, ``[channels, tokens]``."""
    out, starts = torch.empty_like(x), m["query_start_loc"].tolist()
    for i, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        state = m["conv_states"][m["cache_indices"][i]]
        if not m["has_initial_state"][i]:
            state.zero_()
        seen = torch.cat((state, x[:, first:last]), 1)
        state.copy_(seen[:, -state.shape[1] :])
        out[:, first:last] = conv1d(seen, weight.unsqueeze(1), bias, groups=len(weight))
    return out


def convolve_one(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None = None, *, conv_state_indices: Tensor, **_: Any
) -> Tensor:
    """``causal_conv1d_update``, likewise: one token of each request, ``[requests, channels]``."""
    count = len(x)
    return convolve(
        x.T,
        weight,
        bias,
        query_start_loc=torch.arange(count + 1),
        cache_indices=conv_state_indices,
        has_initial_state=torch.ones(count, dtype=torch.bool),
        conv_states=states,
    ).T


def install() -> None:
    """Put these in the place of SGLang's; before it imports its models."""
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    causal_conv1d.causal_conv1d_fn = convolve
    causal_conv1d.causal_conv1d_update = convolve_one
    for wrapped, names in {
        _in_the_windows_pool: ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"),
        _without_sinks: ("forward_extend", "forward_decode"),
    }.items():
        for name in names:
            setattr(TorchNativeAttnBackend, name, wrapped(getattr(TorchNativeAttnBackend, name)))
