"""All that the bytes of a page depend on besides its shape, as one text. Two engines exchange pages only if their texts are equal."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError
from kvxfer_vllm.pages.forms import Form, quant_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["encoding_of"]

_SCALES = ("_k_scale", "_v_scale")


def encoding_of(
    name: str, layer: Any, spec: Any, form: Form, writer: str, tensor: torch.Tensor, config: VllmConfig
) -> str:
    """Return the encoding of the pages of a layer, whose cache is ``[blocks, heads, tokens, content]``.

    ``layer`` is vLLM's layer object, or ``None`` if there is none; ``writer`` is as ``writer_of`` says.
    """
    return _pages(layer, spec, form, writer, tensor, config) + _held_scales(name, layer, spec)


def _pages(layer: Any, spec: Any, form: Form, writer: str, tensor: torch.Tensor, config: VllmConfig) -> str:
    """Return the encoding without the scales."""
    cached = (
        f"{_plain(spec.dtype)}/{_cache_dtype(layer, spec, config)}/{quant_of(spec)}" if hasattr(spec, "dtype") else ""
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
    kernel: tuple[int, ...] = getattr(getattr(layer, "kv_cache", None), "shape", ())
    rows = kernel[-2] if len(kernel) > 2 else states
    return (
        f"vllm/whole/{type(spec).__name__}/{writer or 'unknown'}/{cached}/{getattr(spec, 'tokens_per_state', 1)}/"
        f"{_order(tensor)}{heads}x{states}x{content} by {rows}/{_device(tensor)}/{_scales(config)}"
    )


def _cache_dtype(layer: Any, spec: Any, config: VllmConfig) -> str:
    """Return the type of the stored numbers.

    It is the layer's own cache dtype if the layer has one, because some layers are left out of quantisation. Different names for the
    same type become one name, and fp8 is named by its flavour on this device.
    """
    stated = getattr(layer, "kv_cache_dtype", None) or getattr(spec, "cache_dtype_str", None)
    stated = str(stated or getattr(getattr(config, "cache_config", None), "cache_dtype", "auto"))
    if stated in ("auto", "half", "float", "float16", "bfloat16", "float32"):
        return _plain(spec.dtype)
    if stated in ("fp8", "fp8_e4m3"):
        from vllm.platforms import current_platform

        return _plain(current_platform.fp8_dtype())
    return "float8_e5m2" if stated == "fp8_e5m2" else stated


def _plain(dtype: Any) -> str:
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
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    asked = str(getattr(getattr(config, "attention_config", None), "indexer_kv_dtype", None))
    return f"{asked}-{'ue8m0' if is_deep_gemm_e8m0_used() else 'fp32'}"


def _held_scales(name: str, layer: Any, spec: Any) -> str:
    """Return what a layer's encoding says of the scales by which it quantises, such as ``/k=0.25,v=0.5``.

    They belong to the layer, not to its pages, but pages cannot be read without them. Nothing where its cache is not
    quantised, or all scales lie in its pages, beside each token.

    Raises:
        ConfigError: The scales are not known, or not fixed.
    """
    if getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE") == "NONE":
        return ""
    if layer is None:
        raise ConfigError(f"layer {name!r}: its cache is quantised, and the layer that has its scales cannot be found")
    if getattr(layer, "calculate_kv_scales", False):
        raise ConfigError(
            f"layer {name!r} computes the scales of its cache in its first forward pass, so each engine has its own: "
            "remove calculate_kv_scales, or use a checkpoint that holds scales"
        )
    held = {holder[1]: getattr(layer, holder) for holder in _SCALES if getattr(layer, holder, None) is not None}
    return "/" + ",".join(f"{what}={_told(scale)}" for what, scale in held.items()) if held else ""


def _told(scale: Any) -> str:
    """One number as it is, exactly; one for each of this rank's heads by a hash."""
    values = scale.detach().float().flatten().tolist() if hasattr(scale, "detach") else [float(scale)]
    if len(values) == 1:
        return repr(values[0])
    text = ",".join(map(repr, values))
    return f"{len(values)} by head, {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
