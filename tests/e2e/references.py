"""A server whose gated delta nets, Mamba 1 and Kimi's delta attention compute in plain torch, token by token, in float32.

vLLM's build for CPUs has kernels for the first in bfloat16 alone, and none for the others. All else of these layers is vLLM's: weights
and what a rank loads of them, convolutions, states and their places in the cache.
"""

from __future__ import annotations

from tests.e2e.imported import main  # first: it decides how processes are started

# isort: split
from typing import Any

import torch
from llvmlite.binding import ffi
from torch.nn.functional import normalize, silu, softplus
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.model_executor.models.registry import ModelRegistry
from vllm.models.kimi_k3.nvidia.ops.third_party import kda
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

Tensor = torch.Tensor


def delta_rule(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Change a request's state ``[heads, values, keys]`` by its tokens, and return what they read: ``[tokens, heads, values]``.

    ``decay``: logarithms, for each head's keys or for all of them at once.
    """
    q, k = (normalize(x.float(), dim=-1, eps=1e-6) for x in (q, k))
    out = torch.empty(v.shape)
    for t in range(len(v)):
        kept = state * decay[t].exp().unsqueeze(1)
        missing = (v[t] - torch.einsum("hvk,hk->hv", kept, k[t])) * beta[t].unsqueeze(-1)
        state.copy_(kept + torch.einsum("hv,hk->hvk", missing, k[t]))
        out[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return out * k.shape[-1] ** -0.5


def delta_net(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """``cpu_gdn_attention_core``, without drafts."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    m = context.attn_metadata[layer.prefix]
    inputs, state = layer.kv_cache
    has, slots, starts = _requests(m)
    x = causal_conv1d_fn_cpu(
        mixed_qkv[: m.num_actual_tokens].T,
        gdn_attention._unpacked_conv_weight(layer),
        layer.conv1d.bias,
        inputs if is_conv_state_dim_first() else inputs.transpose(-1, -2),
        starts,
        slots,
        has,
        layer.activation,
    ).T
    keys, values = (n // layer.tp_size for n in (layer.key_dim, layer.value_dim))
    q, k, v = x.split([keys, keys, values], dim=-1)
    q, k = (
        y.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(layer.num_v_heads // layer.num_k_heads, 1)
        for y in (q, k)
    )
    v = v.unflatten(-1, (-1, layer.head_v_dim))
    decay = (-layer.A_log.exp() * softplus(a + layer.dt_bias)).unsqueeze(-1)
    for i, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if not has[i]:
            state[slots[i]] = 0
        at = slice(first, last)
        core_attn_out[at] = delta_rule(state[slots[i]], q[at], k[at], v[at], decay[at], b[at].sigmoid())


def _requests(m: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each request whether it has a state, where, and where its tokens start; those that decode come first."""
    count = m.num_decodes + m.num_prefills
    has = torch.ones(count, dtype=torch.bool)
    if m.num_prefills:
        has[m.num_decodes :] = m.has_initial_state[m.num_decodes : count]
    return has, m.non_spec_state_indices_tensor[:count], m.non_spec_query_start_loc[: count + 1]


def prefill_delta_attention(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, g_bias: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """``chunk_kda_with_fused_gate``."""
    states, starts, out = more["initial_state"], more["cu_seqlens"].tolist(), torch.empty(v.shape)
    decay, beta = _gates(raw_g[0], A_log, g_bias), raw_beta[0].float().sigmoid()
    for state, first, last in zip(states, starts[:-1], starts[1:], strict=True):
        at = slice(first, last)
        out[0, at] = delta_rule(state, q[0, at], k[0, at], v[0, at], decay[at], beta[at])
    return out, states


def decode_delta_attention(
    mixed_qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """``fused_recurrent_kda_packed_decode``."""
    states, slots = more["initial_state"], more["state_indices"]
    _, heads, width, _ = states.shape
    q, k, v = mixed_qkv.view(-1, 3, heads, width).unbind(1)
    decay, beta, out = _gates(raw_g[0], A_log, dt_bias), raw_beta[0].float().sigmoid(), torch.empty(1, *v.shape)
    for i, slot in enumerate(slots.tolist()):
        at = slice(i, i + 1)
        out[0, at] = delta_rule(states[slot], q[at], k[at], v[at], decay[at], beta[at])
    return out, states


def _gates(raw: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """Return the logarithms ``[tokens, heads, keys]`` of what remains of a state, for models without a bound for it."""
    return -a_log.exp().unsqueeze(-1) * softplus(raw.float() + bias.view(raw.shape[1:]))


def gathered(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    """``gather_initial_states``."""
    return state[indices.long()] * has_initial_state.view(-1, 1, 1, 1)


def scan(
    u: Tensor,
    states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    bias: Tensor,
    **m: Any,
) -> Tensor:
    """``selective_scan_fn``: prompts, ``[channels, tokens]``."""
    out, starts = torch.empty_like(u), m["query_start_loc"].tolist()
    for i, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        state = states[m["cache_indices"][i]]
        if not m["has_initial_state"][i]:
            state.zero_()
        for t in range(first, last):
            out[:, t] = _step(state, u[:, t], delta[:, t], A, B[:, t], C[:, t], D, z[:, t], bias)
    return out


def update(
    states: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, **more: Any
) -> None:
    """``selective_state_update``: one token of each request, ``[requests, channels]``."""
    for i, slot in enumerate(more["state_batch_indices"].flatten().tolist()):
        more["out"][i] = _step(states[slot], x[i], dt[i], A, B[i], C[i], D, more["z"][i], bias)


def _step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor
) -> Tensor:
    dt = softplus(dt.float() + bias).unsqueeze(-1)
    state.copy_(state * (dt * A).exp() + dt * B * x.unsqueeze(-1))
    return (state @ C + D * x) * silu(z)


ffi._lib_fn_wrapper.get = lambda self, name: None  # vLLM asks all objects of all modules whether they hold a kernel
# The model for GPUs of NVIDIA's needs their libraries; this one is also for what has no kernels of its own.
ModelRegistry.register_model("KimiLinearForCausalLM", "vllm.models.kimi_k3.amd.linear:KimiLinearForCausalLM")
# Beside states, vLLM has blocks of 128 tokens for MLA. Its workers divide them into those of 16 that its kernel for CPUs takes.
CpuPlatform._check_aligned_block_size = classmethod(lambda cls, *given: None)
gdn_attention.cpu_gdn_attention_core = delta_net
mamba_mixer.selective_scan_fn = scan
mamba_mixer.selective_state_update = update
kimi_gdn_linear_attn.gather_initial_states = gathered
kda.chunk_kda_with_fused_gate = prefill_delta_attention
kda.fused_recurrent_kda_packed_decode = decode_delta_attention

if __name__ == "__main__":
    main()
