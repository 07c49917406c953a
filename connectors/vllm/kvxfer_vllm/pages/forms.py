"""Who writes a layer's pages, and what is therefore known of them.

A spec says what shape a page has, not what lies in it: MLA's latents and the pages of a sparse indexer (all values, then all
scales) have specs of the same class. What lies there is the attention back end's choice, so a page may be cut only
if the back end that writes it is in ``WRITERS``. Any other page is moved whole.
"""

from __future__ import annotations

from typing import Any, Literal

from kvxfer_vllm.pages.catalogue import CATALOGUE

__all__ = ["INDEXER_SCALED", "WRITERS", "Form", "form_of", "indexer_rows", "replicated", "writer_of"]

Form = Literal["kv", "row", "latent", "indexer", "packed", "whole"]
"""``kv``: each head's token is its K, then its V. ``row``: each head's token is one run of bytes. ``latent``: each token is
one run of bytes, for all heads. ``indexer``: the values of all tokens, then their scales, for all heads. ``packed``: each
head's tokens are one piece. ``whole``: the page is one piece."""

INDEXER_SCALED = 128
"""Bytes of an indexer's values, one for each number, that share a scale of 4 bytes."""

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


def writer_of(layer: Any) -> str:
    """Return the name of the class in vLLM that determines how this layer's pages are written; empty if it is not known.

    vLLM derives some classes from its back ends that differ from them only in how they are told what to do
    (``subclass_attention_backend``); for these, the class that they are derived from is returned. A class that differs in more, or
    does not come from vLLM, may write in any way, unless it is in ``WRITERS``.
    """
    get = getattr(layer, "get_attn_backend", None)
    for cls in getattr(get(), "__mro__", ()) if get is not None else ():
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


def indexer_rows(layer: Any, spec: Any) -> tuple[int, int] | None:
    """Return how many bytes of values and of scales an indexer's page has for each token; ``None`` if it is not laid out so.

    It is, for fp8 with fp32 scales, where kernels do not shuffle tokens within a page.
    """
    per_token = spec.head_size * getattr(spec.dtype, "itemsize", 0)
    scales, rest = divmod(per_token * 4, INDEXER_SCALED + 4)
    if rest or getattr(spec.dtype, "itemsize", 0) != 1 or getattr(layer, "uses_shuffled_layout", True):
        return None
    return per_token - scales, scales


def quant_of(spec: Any) -> str:
    """Return the name of a spec's quantisation."""
    return str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))
