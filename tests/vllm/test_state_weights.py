"""Which channels and heads of a recurrent layer a rank computes: those whose weights vLLM's own layer loads on it.

The layers are vLLM's, made as on each rank. Each weight is the number of its channel or head, and goes through the layer's loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.conftest import require

require("vllm")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention  # noqa: E402
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer  # noqa: E402
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention  # noqa: E402
from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402

from kvxfer.geometry import Rank  # noqa: E402
from kvxfer_vllm.internals import Layer  # noqa: E402
from kvxfer_vllm.pages.groups import state_pieces  # noqa: E402

HIDDEN, TAPS, ITEM = 64, 4, 4
KEYS, VALUES, WIDTH, CHANNELS = 4, 8, 16, 32
AT = "model.layers.0.mixer"
Load = Callable[[Any, list[torch.Tensor]], None]
"""Has a layer load the weights of the convolution, one tensor for each section."""


def made(cls: Any, config: Any, **more: Any) -> Any:
    """A layer of gated delta nets, whose base asks a configuration for little."""
    vllm = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, hf_text_config=config),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="float32",
            mamba_ssm_cache_dtype="float32",
            use_kda_recoverssm=False,
            use_replayssm=False,
            mamba_cache_mode="none",
        ),
        quant_config=None,
        speculative_config=None,
        additional_config={},
        parallel_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=8),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    return cls(config, vllm, AT, **more)


def qwen(interleaved: bool) -> Any:
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        linear_num_key_heads=KEYS,
        linear_num_value_heads=VALUES,
        linear_key_head_dim=WIDTH,
        linear_value_head_dim=WIDTH,
        linear_conv_kernel_dim=TAPS,
    )
    return made(QwenGatedDeltaNetAttention, config, gqa_interleaved_layout=interleaved)


def kimi(cls: Any) -> Any:
    attention = {"num_heads": KEYS, "head_dim": WIDTH, "short_conv_kernel_size": TAPS, "kda_layers": [1]}
    attention["use_full_rank_gate"] = cls is KimiK3DeltaAttention
    config = SimpleNamespace(hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-5, linear_attn_config=attention)
    return made(cls, config)


def mamba_1() -> Any:
    layer = MambaMixer(HIDDEN, 16, TAPS, CHANNELS, 4, True, False, True)
    layer.get_state_dtype = lambda: (torch.float32, torch.float32)
    return layer


def packed(layer: Any, sections: list[torch.Tensor]) -> None:
    layer.conv1d.weight.weight_loader(layer.conv1d.weight, torch.cat(sections))


def apart(layer: Any, sections: list[torch.Tensor]) -> None:
    for i, section in enumerate(sections):
        layer.conv1d.weight.weight_loader(layer.conv1d.weight, section, i)


KINDS: dict[str, tuple[Callable[[], Any], Load, list[int], str, int]] = {
    "Qwen 3 Next": (lambda: qwen(True), packed, [KEYS * WIDTH] * 2 + [VALUES * WIDTH], "A_log", VALUES),
    "Qwen 3.5": (lambda: qwen(False), packed, [KEYS * WIDTH] * 2 + [VALUES * WIDTH], "A_log", VALUES),
    "Kimi Linear": (lambda: kimi(KimiGatedDeltaNetAttention), apart, [KEYS * WIDTH] * 3, "A_log", KEYS),
    "Kimi K3": (lambda: kimi(KimiK3DeltaAttention), apart, [KEYS * WIDTH] * 3, "A_log", KEYS),
    "Jamba": (mamba_1, packed, [CHANNELS], "D", CHANNELS),
}
"""How it is made and loaded, how many channels its sections have in all, and a weight with one number for each head of the state."""


@contextmanager
def on(rank: int, size: int) -> Iterator[None]:
    """Be a tensor-parallel rank, as far as layers ask as they are made."""
    group, config = SimpleNamespace(rank_in_group=rank, world_size=size), VllmConfig()
    config.model_config = SimpleNamespace(hf_text_config=None, enforce_eager=True)  # type: ignore[assignment]
    with mock.patch.object(parallel_state, "_TP", group), set_current_vllm_config(config):
        yield


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_s_share_of_a_state_is_what_it_has_the_weights_for(kind: str, size: int) -> None:
    make, load, totals, by_head, heads = KINDS[kind]
    numbers = torch.arange(sum(totals), dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, TAPS)
    for rank in range(size):
        with on(rank, size):
            layer = make()
            load(layer, list(numbers.split(totals)))
            weight = getattr(layer, by_head)
            weight.weight_loader(weight, torch.arange(heads, dtype=torch.float32))
            spec = MambaSpec(block_size=16, shapes=layer.get_state_shape(), dtypes=layer.get_state_dtype())
        loaded = layer.conv1d.weight.flatten(1)[:, 0].tolist()
        rows = TAPS - 1
        found = {p.plane: p for p in state_pieces(Layer(layer), spec, Rank(0, rank), size, "cuda")}
        assert len(found) == len(totals) * rows + 1
        for s, total in enumerate(totals):
            for row in range(rows):
                piece = found[f"inputs {s}.{row}"]
                first = (piece.offset - row * len(loaded) * ITEM) // ITEM
                assert piece.heads is not None and (piece.heads.total, piece.unit) == (total, ITEM)
                of_all = range(
                    sum(totals[:s]) + piece.heads.start, sum(totals[:s]) + piece.heads.start + piece.heads.count
                )
                assert loaded[first : first + piece.heads.count] == list(of_all)
        state = found["state"]
        assert state.heads is not None and state.heads.total == heads
        assert weight.tolist() == list(range(state.heads.start, state.heads.start + state.heads.count))
        assert state.unit * state.heads.count + state.offset == spec.state_content_size_bytes
