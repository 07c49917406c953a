"""Who writes a layer's pages, and what is therefore known of them.

A spec says what shape a page has, not what lies in it: MLA's latents and the pages of a sparse indexer (all values, then all
scales) have specs of the same class. What lies there is the attention back end's choice, so a page may be cut only
if the back end that writes it is in ``WRITERS``. Any other page is moved whole.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from kvxfer.errors import ConfigError
from kvxfer_vllm.pages.catalogue import CATALOGUE

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from kvxfer_vllm.internals import Layer


def encoding_of(
    name: str, layer: Layer, spec: Any, form: Form, writer: str, tensor: torch.Tensor, config: VllmConfig
) -> str:
    """Return the encoding of the pages of a layer, whose cache is ``[blocks, heads, tokens, content]``, by who writes it."""
    return _pages(layer, spec, form, writer, tensor, config) + _held_scales(name, layer, spec)


def _pages(layer: Layer, spec: Any, form: Form, writer: str, tensor: torch.Tensor, config: VllmConfig) -> str:
    """Return the encoding without the scales."""
    cached = (
        f"{dtype_name(spec.dtype)}/{_cache_dtype(layer, spec, config)}/{quant_of(spec)}"
        if hasattr(spec, "dtype")
        else ""
    )
    if form in ("kv", "row"):
        return f"vllm/attention/{form}/{cached}/{spec.head_size}+{getattr(spec, 'head_size_v', spec.head_size)}"
    if form == "latent":
        return f"vllm/mla/{cached}"
    if form == "indexer":
        return f"vllm/indexer/{cached}/{_device(tensor)}/{_scales(config)}"
    _, heads, states, content = tensor.shape
    if form == "packed":
        return f"vllm/attention/packed/{cached}/{_isa()}/{states}x{content}"
    rows = layer.shape[-2] if len(layer.shape) > 2 else states
    return (
        f"vllm/whole/{type(spec).__name__}/{writer or 'unknown'}/{cached}/{getattr(spec, 'tokens_per_state', 1)}/"
        f"{_order(tensor)}{heads}x{states}x{content} by {rows}/{_device(tensor)}/{_scales(config)}"
    )


def _cache_dtype(layer: Layer, spec: Any, config: VllmConfig) -> str:
    """Return the type of the stored numbers.

    It is the layer's own cache dtype if the layer has one, because some layers are left out of quantisation. Different names for the
    same type become one name, and fp8 is named by its flavour on this device.
    """
    stated = layer.cache_dtype or getattr(spec, "cache_dtype_str", None)
    stated = str(stated or getattr(getattr(config, "cache_config", None), "cache_dtype", "auto"))
    if stated in ("auto", "half", "float", "float16", "bfloat16", "float32"):
        return dtype_name(spec.dtype)
    if stated in ("fp8", "fp8_e4m3"):
        from vllm.platforms import current_platform

        return dtype_name(current_platform.fp8_dtype())
    return "float8_e5m2" if stated == "fp8_e5m2" else stated


def dtype_name(dtype: Any) -> str:
    """Return the name of a type of numbers."""
    return str(dtype).removeprefix("torch.")


def _order(tensor: torch.Tensor) -> str:
    """Return whether a page has its tokens within each head (HN) or its heads within each token (NH); empty for one head."""
    if tensor.shape[1] == 1:
        return ""
    return "HN" if tensor.stride(1) >= tensor.stride(2) else "NH"


def _isa() -> str:
    """Return the instruction set for which the CPU kernels pack pages on this machine."""
    import torch

    cpu = torch.cpu
    if getattr(cpu, "_is_amx_tile_supported", lambda: False)():
        return "amx"
    if getattr(cpu, "_is_avx512_bf16_supported", lambda: False)():
        return "avx512bf16"
    return str(torch.backends.cpu.get_cpu_capability()).lower()


def _device(tensor: torch.Tensor) -> str:
    """Return the sort of device whose kernels have written the pages: if their content is unknown, it may be packed for that device."""
    import torch

    if tensor.device.type == "cpu":
        return f"cpu-{_isa()}"
    if tensor.device.type != "cuda":
        return str(tensor.device.type)
    found = torch.cuda.get_device_properties(tensor.device)
    return str(getattr(found, "gcnArchName", "")) or f"sm{found.major}{found.minor}"


def _scales(config: VllmConfig) -> str:
    """Return how a sparse indexer's scales are stored here.

    This is the dtype that was asked for, and whether the kernels use powers of two (ue8m0) or fp32.
    """
    from kvxfer_vllm.internals import rounds_scales

    asked = str(getattr(getattr(config, "attention_config", None), "indexer_kv_dtype", None))
    return f"{asked}-{'ue8m0' if rounds_scales() else 'fp32'}"


def _held_scales(name: str, layer: Layer, spec: Any) -> str:
    """Return what a layer's encoding says of the scales by which it quantises, such as ``/k=0.25,v=0.5``.

    They belong to the layer, not to its pages, but pages cannot be read without them. Nothing where its cache is not
    quantised, or all scales lie in its pages, beside each token.

    Raises:
        ConfigError: The scales are not known.
    """
    if quant_of(spec) == "NONE":
        return ""
    if layer.of is None:
        raise ConfigError(f"layer {name!r}: its cache is quantised, and the layer that has its scales cannot be found")
    return "/" + ",".join(f"{what}={_told(scale)}" for what, scale in layer.scales.items()) if layer.scales else ""


def _told(scale: Any) -> str:
    """One number as it is, exactly; one for each of this rank's heads by a hash."""
    values = scale.detach().float().flatten().tolist() if hasattr(scale, "detach") else [float(scale)]
    if len(values) == 1:
        return repr(values[0])
    text = ",".join(map(repr, values))
    return f"{len(values)} by head, {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


Form = Literal["kv", "row", "latent", "indexer", "packed", "whole"]
"""``kv``: each head's token is its K, then its V. ``row``: each head's token is one run of bytes. ``latent``: each token is
one run of bytes, for all heads. ``indexer``: the values of all tokens, then their scales, for all heads. ``packed``: each
head's tokens are one piece. ``whole``: the page is one piece."""

_HERE = "v1.attention.backends"

WRITERS: dict[str, Form] = {
    **dict.fromkeys(
        (
            f"{_HERE}.flash_attn.FlashAttentionBackend",
            f"{_HERE}.flash_attn_diffkv.FlashAttentionDiffKVBackend",
            f"{_HERE}.flashinfer.FlashInferBackend",
            f"{_HERE}.flex_attention.FlexAttentionBackend",
            f"{_HERE}.hpc_attn.HpcAttentionBackend",
            f"{_HERE}.triton_attn.TritonAttentionBackend",
            f"{_HERE}.triton_attn_diffkv.TritonAttentionDiffKVBackend",
            f"{_HERE}.triton_flash_attn.TritonFlashAttentionBackend",
            f"{_HERE}.triton_flashinfer.TritonFlashInferBackend",
            "models.qwen4_exp.amd.qsa.Qwen4ExpQSAFlashAttentionBackend",
            "models.qwen4_exp.nvidia.qsa.Qwen4ExpQSAFlashAttentionBackend",
            "models.step5.nvidia.sparse_attention.Step5DSAAttentionBackend",
            "models.step5.nvidia.sparse_attention.Step5SplitKVFlashAttentionBackend",
        ),
        "kv",
    ),
    f"{_HERE}.cpu_attn.CPUAttentionBackend": "packed",
    **dict.fromkeys(
        (
            "model_executor.layers.attention.mla_attention.MLACommonBackend",
            f"{_HERE}.mla.amx_mla.AMXMLABackend",
            f"{_HERE}.mla.cpu_mla.CPUMLABackend",
            f"{_HERE}.mla.cutlass_mla.CutlassMLABackend",
            f"{_HERE}.mla.flashattn_mla.FlashAttnMLABackend",
            f"{_HERE}.mla.flashattn_mla_sparse.FlashAttnMLASparseBackend",
            f"{_HERE}.mla.flashinfer_mla.FlashInferMLABackend",
            f"{_HERE}.mla.flashinfer_mla_sparse._FlashInferMLASparseBackendBase",
            f"{_HERE}.mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend",
            f"{_HERE}.mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend",
            f"{_HERE}.mla.flashmla.FlashMLABackend",
            f"{_HERE}.mla.flashmla_sparse.FlashMLASparseBackend",
            f"{_HERE}.mla.tokenspeed_mla.TokenspeedMLABackend",
            f"{_HERE}.mla.triton_mla.TritonMLABackend",
        ),
        "latent",
    ),
    f"{_HERE}.mla.indexer.DeepseekV32IndexerBackend": "indexer",
}
"""Attention back ends by the class that names them, without the leading ``vllm.``. All ``latent`` ones leave the writing to
``MLAAttentionImpl.do_kv_cache_update``, or write rows of their own. ``indexer`` holds where ``indexer_rows`` says so."""

_ON_ALL_RANKS = {
    "models.deepseek_v41.compressor.CompressorBackend",
    "models.qwen4_exp.common.qsa_cache.QSAStateBackend",
    "models.step5.nvidia.csa_tail_ring.Step5CSATailRingBackend",
    "models.step5.nvidia.sparse_summary_cache.Step5SparseSummaryBackend",
    f"{_HERE}.mla.indexer.KpoolTailBackend",
}
"""Writers of rings, and of what becomes of their rows, whose layers tensor parallelism does not divide."""

_INLINE = {"INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD"}
"""Quantisations that keep the scales of each head's token next to it (``TritonAttentionBackend.customize_spec``)."""


def writer_of(layer: Layer) -> str:
    """Return the name of the class in vLLM that determines how this layer's pages are written; empty if it is not known.

    vLLM derives some classes from its back ends that differ from them only in how they are told what to do
    (``subclass_attention_backend``); for these, the class that they are derived from is returned. A class that differs in more, or
    does not come from vLLM, may write in any way, unless it is in ``WRITERS``.
    """
    for cls in layer.backends:
        known = cls.__module__.startswith("vllm.")
        path = f"{cls.__module__.removeprefix('vllm.')}.{cls.__qualname__}" if known else ""
        if "get_name" in vars(cls) or path in WRITERS:
            return path
        if {name for name in vars(cls) if not name.startswith("_")} - {"get_builder_cls"}:
            return ""
    return ""


def form_of(spec: Any, writer: str) -> Form:
    """Return what is known about a layer's pages from the exact class of its spec and from who writes them."""
    if type(spec).__name__ not in CATALOGUE or not type(spec).__module__.startswith("vllm."):
        return "whole"
    form, quant = WRITERS.get(writer, "whole"), quant_of(spec)
    if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "num_head_slots", None) is not None:
        return "whole"
    if form == "kv" and quant in _INLINE and writer.endswith(".TritonAttentionBackend"):
        return "row"
    own = getattr(spec, "state_content_bytes", None) is not None and form != "latent"
    return "whole" if own or quant not in ("NONE", "FP8_PER_TENSOR") else form


def replicated(spec: Any, writer: str) -> bool:
    """Return whether all tensor-parallel ranks hold the same pages, because these hold one vector that all heads share."""
    if writer in _ON_ALL_RANKS:
        return True
    shared = WRITERS.get(writer) in ("latent", "indexer")
    return getattr(spec, "max_tp_shards", None) == 1 or (shared and getattr(spec, "num_kv_heads", 0) == 1)


def indexer_rows(layer: Layer, spec: Any) -> tuple[int, int] | None:
    """Return how many bytes of values and of scales an indexer's page has for each token; ``None`` if it is not laid out so.

    It is, for fp8 with fp32 scales, where kernels do not shuffle tokens within a page.
    """
    from kvxfer_vllm.internals import INDEXER_SCALED

    per_token = spec.head_size * getattr(spec.dtype, "itemsize", 0)
    scales, rest = divmod(per_token * 4, INDEXER_SCALED + 4)
    if rest or getattr(spec.dtype, "itemsize", 0) != 1 or layer.shuffles:
        return None
    return per_token - scales, scales


def quant_of(spec: Any) -> str:
    """Return the name of a spec's quantisation."""
    return str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))
