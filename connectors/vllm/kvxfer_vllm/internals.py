"""Everything of vLLM that kvxfer touches and that is no part of its interface for connectors: each touch is a function of this file.

``TOUCHES`` lists them: what of vLLM a touch needs, and why there is no hook for it. ``changed`` says which of them the vLLM that is
installed no longer fits; `kvxfer doctor` runs it, and a test does, by name. All were seen on vLLM 0.31, 0.32 and 0.33.
``docs/what-vllm-lacks.md`` has the hook that each would need.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import queue
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvxfer.engine import EngineQueue
from kvxfer.logs import logger
from kvxfer.memory.proof import Unproven, Write

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.request import Request

log = logger("kvxfer.vllm")

F = TypeVar("F", bound=Callable[..., Any])


class Touch(NamedTuple):
    """One touch: what of vLLM it ``needs``, as ``module:Class.attribute``, and ``why`` no hook will do."""

    needs: tuple[str, ...]
    why: str


TOUCHES: dict[str, Touch] = {}
"""All touches, by the names of their functions."""


def touches(*needs: str, why: str) -> Callable[[F], F]:
    """Mark a function as a touch."""

    def mark(function: F) -> F:
        TOUCHES[function.__name__] = Touch(needs, why)
        return function

    return mark


def changed() -> dict[str, list[str]]:
    """Return what the installed vLLM lacks of what touches need, by touch."""
    found = {name: [need for need in touch.needs if not _has(need)] for name, touch in TOUCHES.items()}
    return {name: lacks for name, lacks in found.items() if lacks}


def _has(need: str) -> bool:
    """Return whether vLLM has it: an attribute of a module or class, or one that a class or function gives to objects."""
    where, _, path = need.partition(":")
    try:
        at: Any = importlib.import_module(where)
    except Exception:  # whatever it is: vLLM cannot use it either
        return False
    for name in path.split("."):
        if inspect.isfunction(at):
            return name in (*at.__code__.co_consts, *at.__code__.co_names)
        if not hasattr(at, name):
            kinds = at.__mro__ if inspect.isclass(at) else ()
            return any(_gives(kind, name) for kind in kinds if kind.__module__.startswith("vllm."))
        at = getattr(at, name)
    return True


def _gives(kind: type, name: str) -> bool:
    """Return whether a class gives its instances an attribute: it declares it, or a method of it writes to one of that name.

    It goes by the code that runs, because a release may be installed without its sources.
    """
    methods = (inner for method in vars(kind).values() for inner in _inner(method))
    written = (step for method in methods for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")
    return name in vars(kind).get("__annotations__", {}) or any(step.argval == name for step in written)


def _inner(method: Any) -> list[Any]:
    """Return a function and those it wraps: another library may have put its own around vLLM's (kvcached does), named or not."""
    found: list[Any] = []
    left = [method]
    while left:
        function = left.pop()
        if inspect.isfunction(function) and function not in found:
            found.append(function)
            left.append(getattr(function, "__wrapped__", None))
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    left.append(cell.cell_contents)
    return found


# --- releases ------------------------------------------------------------------------------------------------------

FOLLOWS_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")
"""Whether vLLM announces that sleep mode unmaps the cache (0.33 and later); earlier releases unmap it during a transfer."""


TAKES_LOADED_WINDOWS = hasattr(base.KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
"""Whether vLLM asks which groups a load restores (0.32 and later); earlier releases compute a window again behind a load, too."""


def _hit_source() -> Any:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


HIT_SOURCE = _hit_source()
"""Label of loaded tokens in vLLM's cache-hit metrics; None before 0.32."""


# --- requests ------------------------------------------------------------------------------------------------------

REQUEST, MANAGER, POOL = (
    "vllm.v1.request:Request",
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "vllm.v1.core.block_pool:BlockPool",
)
COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
BLOCK = "vllm.v1.core.kv_cache_utils:KVCacheBlock"
GROUP = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"


@touches(
    "vllm.v1.outputs:KVConnectorOutput.finished_recving",
    why="a load that the scheduler side knows to be over is told to vLLM by workers only, a step later",
)
def tell_over(output: Any, over: Set[str]) -> None:
    """Have vLLM's scheduler, which is about to read a worker output, find in it that these loads are over, and no others."""
    if over or output.finished_recving:
        output.finished_recving = over


@touches(
    f"{REQUEST}._all_token_ids",
    f"{REQUEST}.prompt_token_ids",
    f"{REQUEST}.max_tokens",
    f"{REQUEST}.num_prompt_tokens",
    f"{REQUEST}.block_hashes",
    f"{REQUEST}.update_block_hashes",
    why="a prefill engine cannot ask for a prompt to be computed up to a token and no further",
)
def leave_last_token(request: Request) -> None:
    """Have vLLM compute this prompt without its last token, and no further: the next step would overwrite the state.

    What it answers is of no use to anybody. The prompt has two tokens at least, and cannot grow.
    """
    assert request.prompt_token_ids is not None
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # its caller and other samples may have the same list
    del request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    del request.block_hashes[-1:]  # which may be of a block that ended with that token, and is to end with another
    request.update_block_hashes()


@touches(
    f"{REQUEST}.cache_salt",
    f"{REQUEST}.block_hashes",
    f"{REQUEST}.update_block_hashes",
    why="vLLM's prefix cache knows an adapter by its name, also after it was loaded again with other weights",
)
def cache_under(request: Request, suffix: str) -> None:
    """Have vLLM cache and find a request's blocks under another salt than its own."""
    request.cache_salt = f"{request.cache_salt or ''} {suffix}"
    request.block_hashes.clear()
    request.update_block_hashes()


# --- the KV cache --------------------------------------------------------------------------------------------------


@touches(
    f"{POOL}.touch",
    f"{POOL}.free_blocks",
    f"{POOL}.blocks",
    f"{POOL}.get_new_blocks",
    f"{POOL}.get_num_free_blocks",
    f"{POOL}.num_gpu_blocks",
    f"{BLOCK}.block_id",
    f"{BLOCK}.is_null",
    f"{BLOCK}.ref_cnt",
    why="bind_gpu_block_pool hands out the pool, and no interface of it",
)
class VllmBlockPool:
    """A ``kvxfer.engine.BlockPool`` over vLLM's ``BlockPool``."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def touch(self, blocks: Sequence[int]) -> None:
        """See ``kvxfer.engine.BlockPool``."""
        self._pool.touch([self._pool.blocks[b] for b in blocks])

    def free(self, blocks: Sequence[int]) -> None:
        """See ``kvxfer.engine.BlockPool``."""
        self._pool.free_blocks([self._pool.blocks[b] for b in blocks])

    def lend(self, blocks: int) -> list[int] | None:
        """See ``kvxfer.engine.LendingPool``. Lends at most a quarter of the free blocks, because vLLM allocates as many again."""
        if blocks > self._pool.get_num_free_blocks() // 4:
            return None
        try:
            return [block.block_id for block in self._pool.get_new_blocks(blocks)]
        except ValueError:  # free a moment ago: kvcached shares memory with other engines
            return None

    def capacity(self) -> int:
        """See ``kvxfer.engine.ElasticPool``. Of kvcached's blocks only those in use have memory; free ones can be given some."""
        if not hasattr(self._pool, "kv_cache_manager"):  # vLLM's own pool, all of whose blocks have memory
            return int(self._pool.num_gpu_blocks) - 1
        return self.used() + int(self._pool.get_num_free_blocks())

    def used(self) -> int:
        """See ``kvxfer.engine.BlockPool``. Excludes vLLM's null block; counts references: kvcached's list of free blocks is incomplete."""
        return sum(block.ref_cnt > 0 for block in self._pool.blocks if not block.is_null)


@touches(
    f"{MANAGER}.block_pool",
    f"{MANAGER}.coordinator",
    f"{MANAGER}.get_block_ids",
    f"{MANAGER}.get_computed_blocks",
    f"{MANAGER}.evict_blocks",
    f"{POOL}.hash_block_size",
    f"{POOL}.enable_caching",
    f"{POOL}.cache_full_blocks",
    f"{POOL}.get_cached_block",
    f"{COORDINATOR}.find_longest_cache_hit",
    f"{COORDINATOR}.single_type_managers",
    *(f"{GROUP}.{what}" for what in ("block_size", "kv_cache_spec", "req_to_blocks", "use_eagle", "_partial_hit_reqs")),
    "vllm.v1.kv_cache_interface:KVCacheSpec.prefix_cacheable",
    f"{BLOCK}.block_hash",
    why="bind_kv_cache_manager hands out the manager, and no interface that says what is free, cached, or whose",
)
class PrefixCache:
    """vLLM's KV cache, as far as its manager knows it: what is free, whose blocks are which, and what of a prompt is cached.

    Nothing is asked of it before ``bind``, which vLLM calls before there is a request.

    Attributes:
        hashed: Tokens for which vLLM has one hash; 0 if nothing is cached.
    """

    _manager: Any
    hashed: int

    def bind(self, manager: Any) -> None:
        """Take vLLM's manager, once it is there."""
        self._manager, self._pool, self._coordinator = manager, manager.block_pool, manager.coordinator
        caches = getattr(self._pool, "enable_caching", False)
        self.hashed = int(getattr(self._pool, "hash_block_size", 0)) if caches else 0

    @property
    def free(self) -> int:
        """Blocks that are free."""
        return int(self._pool.get_num_free_blocks())

    def table(self, name: str) -> Sequence[Sequence[int]]:
        """Return the block table of a request."""
        rows: Sequence[Sequence[int]] = self._manager.get_block_ids(name)
        return rows

    def tokens(self, request: Request) -> int:
        """Return how many tokens of a request's prompt are cached."""
        return int(self._manager.get_computed_blocks(request)[1])

    def hit(self, hashes: Sequence[Any], tokens: int) -> tuple[list[list[int]], int]:
        """Return the cached blocks of the tokens of these hashes, by group, and how many tokens that is."""
        blocks, cached = self._coordinator.find_longest_cache_hit(hashes, tokens)[:2]
        return [[block.block_id for block in row] for row in blocks], int(cached)

    def block(self, of: Any, group: int) -> int | None:
        """Return the cached block of a hash."""
        found = self._pool.get_cached_block(of, [group])
        return found[0].block_id if found else None

    def evict(self, blocks: Collection[int]) -> None:
        """Take blocks out of the prefix cache."""
        self._manager.evict_blocks(blocks)

    @touches(
        f"{REQUEST}.num_computed_tokens",
        f"{MANAGER}.free",
        why="vLLM knows one policy for failed loads, and the load of a prefix that nobody had to load should fail no request",
    )
    def compute_anew(self, request: Any) -> None:
        """Have vLLM compute a request of which it is about to hear that its load is over: nothing of that has come.

        It then does what it would do about a failed load if its policy were to recompute, whatever the policy is.
        """
        request.num_computed_tokens = 0
        self._manager.free(request)

    @property
    def drops_last(self) -> bool:
        """Whether a lookup in a cache of one group drops the last block, for the sake of drafts."""
        return bool(self._coordinator.single_type_managers[0].use_eagle)

    def caches(self, group: int) -> bool:
        """Return whether vLLM caches blocks of a group."""
        return bool(self._coordinator.single_type_managers[group].kv_cache_spec.prefix_cacheable)

    def changes(self, group: int, blocks: Collection[int]) -> bool:
        """Return whether a request is about to compute on in one of these blocks of states, which vLLM copies with the next step."""
        unsaved = getattr(self._coordinator.single_type_managers[group], "_partial_hit_reqs", {})
        return any(block.block_id in blocks for _, block in unsaved.values())

    def cache_all(self, request: Request, group: int, computed: int, unfilled: Collection[int]) -> None:
        """Cache all full blocks of the first ``computed`` tokens of a request, but for those left ``unfilled``."""
        manager = self._coordinator.single_type_managers[group]
        blocks = manager.req_to_blocks.get(request.request_id, ())
        full = min(computed // manager.block_size, len(blocks))
        left = [block.is_null or block.block_id in unfilled for block in blocks[:full]]
        fresh = [not out and block.block_hash is None for out, block in zip(left, blocks, strict=False)]
        if any(fresh):
            first = fresh.index(True)
            more = {"block_mask": fresh[first:]}
            self._pool.cache_full_blocks(request, blocks, first, full, manager.block_size, group, **more)


@touches(
    f"{MANAGER}.reset_prefix_cache",
    why="with reset_running_requests vLLM preempts all requests and raises if a block is in use, before it tells its connector",
)
def around_reset(manager: Any, before: Callable[[], None], refused: Callable[[], None]) -> None:
    """Wrap the cache manager's ``reset_prefix_cache`` so that ``before`` runs first, and ``refused`` if nothing was reset."""
    reset = manager.reset_prefix_cache

    def reset_prefix_cache() -> Any:
        before()
        done = reset()
        if not done:
            refused()
        return done

    manager.reset_prefix_cache = reset_prefix_cache


# --- layers --------------------------------------------------------------------------------------------------------

ATTENTION = "vllm.model_executor.layers.attention.attention:Attention"
MLA = "vllm.model_executor.layers.attention.mla_attention:MLAAttention"
MIXER = "vllm.model_executor.layers.mamba.mamba_mixer2"
INDEXER = "vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache"

INDEXER_SCALED = 128
"""Bytes of an indexer's values, one for each number, that share a scale of 4 bytes."""


@touches(
    f"{ATTENTION}.get_attn_backend",
    f"{ATTENTION}.kv_cache",
    f"{ATTENTION}.kv_cache_dtype",
    f"{ATTENTION}.sliding_window",
    "vllm.model_executor.layers.attention.attention:set_default_quant_scales._k_scale",
    "vllm.model_executor.layers.attention.attention:set_default_quant_scales._v_scale",
    f"{MIXER}:MambaMixer2.num_spec",
    f"{MIXER}:MambaMixer2.norm",
    f"{MIXER}:Mixer2RMSNormGated.n_groups",
    f"{INDEXER}.uses_shuffled_layout",
    why="a layer's spec does not say how its cache is scaled, ordered, and shared among ranks",
)
@dataclass(frozen=True)
class Layer:
    """What one of a model's layers says of its cache. Most layers say a part of it, and one that the model does not name nothing."""

    of: Any = None  # vLLM's own
    model: Mapping[str, Any] = field(default_factory=dict)  # all layers that have a cache, by name

    @property
    def kind(self) -> str:
        """The name of its class; empty if that is not vLLM's."""
        return type(self.of).__name__ if type(self.of).__module__.startswith("vllm.") else ""

    @property
    def backends(self) -> tuple[type, ...]:
        """The class of its attention back end, and those that this is derived from."""
        get = getattr(self.of, "get_attn_backend", None)
        return () if get is None else getattr(get(), "__mro__", ())

    @property
    def cache_dtype(self) -> str | None:
        """The name of the type of its numbers."""
        return getattr(self.of, "kv_cache_dtype", None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its cache as its kernels see it."""
        return tuple(getattr(getattr(self.of, "kv_cache", None), "shape", ()))

    @property
    def scales(self) -> dict[str, Any]:
        """The scales of its K and V, as far as it has them."""
        found = {"k": getattr(self.of, "_k_scale", None), "v": getattr(self.of, "_v_scale", None)}
        return {what: scale for what, scale in found.items() if scale is not None}

    @property
    def shuffles(self) -> bool:
        """Whether kernels may shuffle tokens within its pages."""
        return bool(getattr(self.of, "uses_shuffled_layout", True))

    @property
    def drafts(self) -> int | None:
        """The rows of its state that are for drafts; None if it does not say."""
        return getattr(self.of, "num_spec", None)

    @property
    def groups(self) -> int | None:
        """How many groups of heads its state has in all."""
        return getattr(getattr(self.of, "norm", None), "n_groups", None)

    def sees_window(self, spec: Any) -> bool:
        """Return whether it has a window. Without the hybrid manager all layers may have one spec, which names the window of some."""
        return bool(getattr(self.of, "sliding_window", getattr(spec, "sliding_window", None)))


@touches(
    "vllm.config:CompilationConfig.static_forward_context",
    why="register_kv_caches gives tensors by name, and not the layers",
)
def layer_of(vllm_config: Any, name: str) -> Layer:
    """Return a layer of the model by its name."""
    model = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", {})
    return Layer(model.get(name), model)


@touches(
    f"{ATTENTION}.kv_sharing_target_layer_name",
    f"{ATTENTION}.impl",
    f"{ATTENTION}.num_kv_heads",
    f"{ATTENTION}.head_size",
    f"{ATTENTION}.head_size_v",
    f"{MLA}.impl",
    f"{MLA}.kv_lora_rank",
    f"{MLA}.qk_rope_head_dim",
    f"{MLA}.hisparse_cache",
    f"{INDEXER}.head_dim",
    "vllm.v1.attention.backend:AttentionBackend.is_mla",
    "vllm.v1.attention.backend:AttentionBackend.forward_includes_kv_cache_update",
    "vllm.v1.attention.backend:MLAAttentionImpl.do_kv_cache_update",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
    "vllm._custom_ops:indexer_k_quant_and_cache",
    why="no layer can be asked where it writes a token's KV",
)
def write_of(named: Layer, dtype: torch.dtype) -> Write:
    """Return a layer's own write.

    Raises:
        Unproven: None can be called outside of a forward pass.
    """
    layer = named.of
    if getattr(layer, "kv_sharing_target_layer_name", None):
        layer = named.model[
            layer.kv_sharing_target_layer_name
        ]  # it has no cache of its own, and reads what that one writes
    if type(layer).__name__ == "DeepseekV32IndexerCache":
        return _of_indexer(layer, dtype)
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    backend = layer.get_attn_backend() if update is not None else None
    if update is None or backend is None or getattr(layer, "hisparse_cache", None) is not None:
        raise Unproven("it has no write that can be called by itself")
    if backend.is_mla():
        inputs = {"kv_c": (layer.kv_lora_rank,), "k_pe": (1, layer.qk_rope_head_dim)}
        return Write(inputs, dtype, partial(_mla, layer))
    if backend.forward_includes_kv_cache_update:
        raise Unproven("it writes within its forward pass")
    inputs = {"k": (layer.num_kv_heads, layer.head_size), "v": (layer.num_kv_heads, layer.head_size_v)}
    return Write(inputs, dtype, lambda kv, slots: update(layer, *kv, layer.kv_cache, slots))


def _mla(layer: Any, kv: Any, slots: Any) -> None:
    latent, rope = kv
    layer.impl.do_kv_cache_update(latent, rope, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)


def _of_indexer(layer: Any, dtype: torch.dtype) -> Write:
    """Return the write of a sparse indexer's keys, fp8 with fp32 scales, as vLLM's unfused kernels do it."""
    from vllm import _custom_ops as ops

    size, rest = divmod(layer.head_dim * INDEXER_SCALED, INDEXER_SCALED + 4)
    if rest or layer.uses_shuffled_layout:
        raise Unproven("it is not of fp8 with a scale for each 128 elements, in rows")

    def call(keys: Any, slots: Any) -> None:
        ops.indexer_k_quant_and_cache(keys[0], layer.kv_cache, slots, INDEXER_SCALED, "ue8m0")

    return Write({"index": (size,)}, dtype, call)


def ask_for_tile_registers() -> None:
    """Have this process ask the kernel for AMX tiles.

    A decode worker's first forward is a one-token step, which uses them without asking and dies of SIGILL; torch asks
    during longer steps only. Does nothing on other processors. (This is torch's, not vLLM's.)
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


@touches("vllm.utils.deep_gemm:is_deep_gemm_e8m0_used", why="no spec says how a sparse indexer's scales are stored")
def rounds_scales() -> bool:
    """Return whether kernels round a sparse indexer's scales to powers of two (ue8m0)."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())


@touches(
    "vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first",
    why="no spec says in which order a convolution's state lies; an environment variable of vLLM's decides",
)
def channels_outside() -> bool:
    """Return whether a convolution's state is [channels, rows] rather than [rows, channels]."""
    from vllm.model_executor.layers.mamba import mamba_utils

    return bool(mamba_utils.is_conv_state_dim_first())


@touches(
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.get_manager_class",
    why="no spec says which blocks of a request its manager keeps",
)
def manager_of(spec: Any) -> str:
    """Return the name of the class that vLLM has registered to manage such blocks; empty if there is none."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    try:
        return str(KVCacheSpecRegistry.get_manager_class(spec).__name__)
    except Exception:  # whatever it raises: this is no spec that it knows
        return ""


# --- adapters ------------------------------------------------------------------------------------------------------

_wrappers: set[Callable[..., Any]] = set()
LORA = "vllm.lora.lora_weights:LoRALayerWeights"


@touches(
    "vllm.lora.lora_model:LoRAModel.loras",
    "vllm.lora.lora_model:LoRAModel.is_3d_lora_weight",
    *(f"{LORA}.{what}" for what in ("rank", "scaling", "lora_a", "lora_b")),
    why="nobody can be asked which weights an adapter has",
)
def weights_of(adapter: Any) -> tuple[Any, ...]:
    """Return an adapter's weights as vLLM has read them, with its ranks and its scaling, in an order of their own."""
    layers = [
        (name, layer.rank, float(layer.scaling), layer.lora_a, layer.lora_b)
        for name, layer in sorted(adapter.loras.items())
    ]
    return bool(getattr(adapter, "is_3d_lora_weight", False)), layers


@touches(
    "vllm.v1.worker.worker_base:WorkerBase.vllm_config",
    why="what a connector has workers do is given vLLM's worker, not the worker's connector",
)
def adapters_of(worker: Any) -> Any:
    """Return the configuration of a worker's adapters."""
    return worker.vllm_config.lora_config


@touches(
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
    "vllm.lora.worker_manager:WorkerLoRAManager.lora_config",
    "vllm.lora.request:LoRARequest.lora_int_id",
    why="a connector's worker is not told which adapter is loaded, nor that its files were read again",
)
def after_loading_adapter(hear: Callable[[Any, int, Any], None]) -> None:
    """Have ``hear(lora_config, number, adapter)`` called after each adapter that a worker of this process loads."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter
    if load in _wrappers:
        return

    @functools.wraps(load)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        adapter = load(self, lora_request)
        hear(self.lora_config, lora_request.lora_int_id, adapter)
        return adapter

    _wrappers.add(_load_adapter)
    WorkerLoRAManager._load_adapter = _load_adapter


@touches(
    "vllm.v1.engine.core:EngineCore.add_lora",
    "vllm.v1.engine.core:EngineCore.model_executor",
    "vllm.v1.engine.core:EngineCore.vllm_config",
    "vllm.v1.executor.abstract:Executor.collective_rpc",
    "vllm.lora.request:LoRARequest.lora_int_id",
    why="a connector's scheduler side is not told that an adapter was added, and cannot ask the workers",
)
def after_adding_adapter(hear: Callable[[Any, int, Callable[..., Iterable[Any]]], None]) -> None:
    """Have ``hear(lora_config, number, ask)`` called after an engine was told to load an adapter; ``ask`` calls a function on workers."""
    from vllm.v1.engine.core import EngineCore

    add = EngineCore.add_lora
    if add in _wrappers:
        return

    @functools.wraps(add)
    def add_lora(self: Any, lora_request: Any) -> bool:
        try:
            return bool(add(self, lora_request))
        finally:
            hear(self.vllm_config.lora_config, lora_request.lora_int_id, self.model_executor.collective_rpc)

    _wrappers.add(add_lora)
    EngineCore.add_lora = add_lora


# --- the engine's loop ---------------------------------------------------------------------------------------------


@touches(
    "vllm.v1.engine.core:EngineCoreProc.input_queue",
    "vllm.v1.engine.core:EngineCoreProc.shutdown_state",
    "vllm.v1.engine.core:EngineCoreProc.vllm_config",
    "vllm.v1.engine:EngineCoreRequestType.WAKEUP",
    why="an engine without requests makes no steps, and no connector has a handle to wake it; so it is looked for in callers' frames",
)
class EngineLoop:
    """The loop of the engine that is being built while this is made, if it has one: it is looked for among the callers.

    Attributes:
        wake: Wakes it; it makes no steps while it has no requests, and then hears nothing but its own input queue. Any thread may call
            it. None: there is no loop, or none that sleeps.
    """

    def __init__(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self._core, self._wakeup = _engine_being_built(), EngineCoreRequestType.WAKEUP
        inbox = getattr(self._core, "input_queue", None)
        self._inbox = inbox if isinstance(inbox, queue.Queue) else None
        self.wake = None if self._inbox is None else partial(self._inbox.put_nowait, (self._wakeup, None))

    def queue(self, unfinished: Callable[[], int]) -> EngineQueue | None:
        """Return what tells whether the engine has anything else to do than to wait for loads; ``None`` if that cannot be told.

        It cannot if other engines wait for each of its steps (data parallelism).
        """
        parallel = getattr(getattr(self._core, "vllm_config", None), "parallel_config", None)
        alone = getattr(parallel, "data_parallel_size", 1) == 1
        return EngineQueue(unfinished, self._arriving) if self._inbox is not None and alone else None

    def _arriving(self) -> bool:
        """Return whether anything but a call to wake is in its queue: what that was for is no news to a step that waits for it."""
        # Without the queue's lock, which a signal handler may want on this thread; a copy is taken at one go.
        return self._inbox is not None and any(kind is not self._wakeup for kind, _ in tuple(self._inbox.queue))

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop, as by SIGTERM. vLLM then takes no more requests."""
        return bool(getattr(self._core, "shutdown_state", 0))


def _engine_being_built() -> Any:
    """Return vLLM's engine, if there is one among the callers."""
    from vllm.v1.engine.core import EngineCoreProc

    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCoreProc):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


# --- other connectors ----------------------------------------------------------------------------------------------


@touches(
    "vllm.distributed.kv_transfer:get_kv_transfer_group",
    "vllm.distributed.kv_transfer:has_kv_transfer_group",
    why="MultiConnector gives the handshake metadata of its first child to all, and does not say to a child that it is one",
)
def stands_alone(connector: Any) -> bool:
    """Whether this is the worker process's connector, not one of several inside another."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


@touches(
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory._registry",
    why="registering a name twice raises, and the registry cannot be asked",
)
def register_connector(name: str, module: str) -> bool:
    """Register a connector by name; return False if it is registered already."""
    if name in KVConnectorFactory._registry:
        return False
    KVConnectorFactory.register_connector(name, module, name)
    return True


_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


@touches(
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector",
    why="a child of MultiConnector gets a configuration of its own, and vLLM goes by the engine's; so it is looked for in callers' frames",
)
def engine_transfer(vllm_config: VllmConfig) -> KVTransferConfig:
    """Return the engine's ``kv_transfer_config``: the outermost one. Call it while vLLM makes a connector or its metrics."""
    found: Any = vllm_config.kv_transfer_config
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == _MULTI:
            outer = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
            found = found if outer is None else outer
    return found


def loads_safely(vllm_config: VllmConfig) -> bool:
    """Return whether this connector may load: by its own role, and by the engine's.

    vLLM keeps the blocks of a finished request until no step writes to them any more only in an engine that is a consumer.
    """
    return bool(vllm_config.kv_transfer_config.is_kv_consumer and engine_transfer(vllm_config).is_kv_consumer)


def together(vllm_config: VllmConfig) -> Iterator[type]:
    """Yield the classes of all connectors inside the ``MultiConnector`` that makes this one; nothing outside of one."""
    outer = engine_transfer(vllm_config)
    if outer is not vllm_config.kv_transfer_config:
        yield from _inside(outer)


def _inside(transfer: KVTransferConfig) -> Iterator[type]:
    for entry in transfer.kv_connector_extra_config.get("connectors", ()):
        child = type(transfer)(**entry)
        if child.kv_connector == "MultiConnector":
            yield from _inside(child)
        else:
            yield KVConnectorFactory.get_connector_class(child)
