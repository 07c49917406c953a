"""What is not supported: reported at start, by SGLang's own names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvxfer import KvxferError
from kvxfer.values import MAX_PAYLOAD
from kvxfer_sglang.states import DSA, MAMBA, SWA, kind_of


class UnsupportedSetupError(KvxferError):
    """The server is set up in a way whose KV is not moved."""


def check_setup(args: Any, decodes: bool) -> None:
    """Refuse a server whose KV would not be moved, or not completely. ``args``: SGLang's ``KVArgs`` of this rank.

    Raises:
        UnsupportedSetupError: It names all that is in the way.
    """
    found = list(_obstacles(args, decodes))
    if found:
        raise UnsupportedSetupError("--disaggregation-transfer-backend kvxfer does not support " + "; ".join(found))


def check_adapters(server_args: Any) -> None:
    """Refuse a server with adapters: SGLang hands over no request's adapter, and two servers may have two under one name.

    Raises:
        UnsupportedSetupError: It has adapters, or may load some.
    """
    if getattr(server_args, "enable_lora", None) or getattr(server_args, "lora_paths", None):
        raise UnsupportedSetupError(
            "--disaggregation-transfer-backend kvxfer does not support --enable-lora and --lora-paths: SGLang does not tell which "
            "adapter a request's KV was computed with"
        )


def _obstacles(args: Any, decodes: bool) -> Iterator[str]:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_device, get_disagg, get_exec, get_memory, get_parallel
    from sglang.srt.utils.common import is_hip

    parallel, disagg = get_parallel(), get_disagg()
    kinds = list(map(kind_of, args.state_types))
    others = [kind for kind in kinds if kind not in (SWA, MAMBA, DSA) or kinds.count(kind) > 1]
    if others:
        yield f"pools with states of this kind ({', '.join(others)})"
    elif SWA in kinds and parallel.pp_size > 1:
        yield (
            f"--pp-size {parallel.pp_size} together with a sliding-window pool, whose layers SGLang does not name: give such a "
            "model one stage"
        )
    if SWA in kinds and args.swa_kv_cache_layout != "nhd":
        yield f"a sliding-window pool that is not laid out token by token, head by head ({args.swa_kv_cache_layout})"
    if args.is_hybrid_mla_backend or args.mla_compression_ratios or args.kv_layout:
        yield "hybrid or compressed latent pools"
    if args.num_draft_entries and parallel.pp_size > 1:
        yield "the draft model's cache (--speculative-algorithm) together with pipeline stages"
    if "fp4" in args.kv_cache_dtype_str:
        yield f"--kv-cache-dtype {args.kv_cache_dtype_str}, whose scales SGLang does not hand over"
    if parallel.attn_cp_size > 1:
        yield f"--attn-cp-size {parallel.attn_cp_size}: context parallelism"
    if parallel.attn_dcp_size > 1:
        yield f"--dcp-size {parallel.attn_dcp_size}: decode context parallelism"
    if parallel.enable_kv_cache_sharding:
        yield "--enable-kv-cache-sharding"
    if parallel.enable_dsa_cache_layer_split:
        yield "--enable-dsa-cache-layer-split"
    if get_memory().enable_hisparse:
        yield "--enable-hisparse"
    if disagg.disaggregation_decode_allocation_policy != "early":
        yield f"--disaggregation-decode-allocation-policy {disagg.disaggregation_decode_allocation_policy}"
    if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        yield "SGLANG_DISAGG_STAGING_BUFFER: the servers may have different numbers of ranks without it"
    if envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() == "INTRA_NODE_NVLINK":
        yield "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK, which keeps metadata on the GPU"
    if decodes and not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get():
        yield (
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0, which would let pages be reused while a failed transfer "
            "may still write to them"
        )
    if get_exec().features.enable_memory_saver:
        yield "--enable-memory-saver, which takes the pool's memory away while transfers may touch it"
    if get_device().device not in ("cpu", "cuda") or is_hip():
        yield f"devices of this kind ({'ROCm' if is_hip() else get_device().device})"
    told = sum(args.aux_item_lens)
    if told > MAX_PAYLOAD:
        yield f"{told} bytes of metadata for each request, more than {MAX_PAYLOAD}"
