"""Read kvxfer's settings from vLLM's configuration, and refuse at start what kvxfer does not support."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

import kvxfer_vllm.internals as internals
from kvxfer.errors import ConfigError
from kvxfer.logs import logger
from kvxfer.transport import registry
from kvxfer.transport.auto import AUTO
from kvxfer.values import Group
from kvxfer_vllm.internals import engine_transfer, loads_safely, together
from kvxfer_vllm.layout import turn_takers
from kvxfer_vllm.migration import ConnectorConfig, check_hosts, defaults, located, translate
from kvxfer_vllm.pages.groups import group_pages, replays

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logger("kvxfer.vllm")


def share() -> None:
    """Send kvxfer's lines where vLLM's go, at vLLM's level; do nothing if kvxfer's logger is configured already."""
    ours, vllm = logging.getLogger("kvxfer"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(vllm.handlers)
        ours.setLevel(vllm.level)


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


BLOCKS_OUTERMOST = "BLHNC"
"""All layers of a block lie side by side, so that a block is one run; within a layer each head's tokens do, so that ranks which hold some
of the heads have runs, too."""


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Return the layout to ask vLLM for; None if it is to choose.

    vLLM treats this as a preference. ``VLLM_KV_CACHE_LAYOUT`` takes precedence. An attention back end that does not have the layout gets
    another one, with a warning of vLLM's. So nothing is asked for where that is certain, or where the layout has not been tried:

    - on other devices than CUDA: CPU attention has one layout, and those of ROCm have their own order;
    - of models with latent attention or recurrent states, whose pages vLLM packs in ways of its own;
    - under kvcached, which lays the cache out itself;
    - inside ``MultiConnector``, which refuses to start if two connectors ask for different layouts.
    """
    model: Any = vllm_config.model_config
    if model is None or getattr(model, "use_mla", True) or getattr(model, "is_hybrid", True):
        return None
    if engine_transfer(vllm_config) is not vllm_config.kv_transfer_config:
        return None
    if os.environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true"):
        return None
    return BLOCKS_OUTERMOST if _on_cuda() else None


def _on_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


Translate = Callable[[Mapping[str, Any], Any], tuple[dict[str, Any], tuple[str, ...]]]
"""Makes settings of ours, and notes for the log, out of ``kv_connector_extra_config`` and its ``KVTransferConfig``."""


def settings_of(vllm_config: VllmConfig, translated: Translate = translate) -> ConnectorConfig:
    """Return the user's ``kv_connector_extra_config``, checked, as it is for this process.

    Raises:
        ConfigError: A setting is wrong.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError("kvxfer needs a kv_transfer_config")
    mapping, notes = translated(transfer.kv_connector_extra_config or {}, transfer)
    for note in notes:
        log.warning("%s", note)
    if misplaced := sorted(mapping.keys() & getattr(type(transfer), "__dataclass_fields__", {}).keys()):
        raise ConfigError(
            f"{', '.join(misplaced)} in kv_connector_extra_config is a setting of vLLM's: move it up, beside 'kv_connector'"
        )
    check_installed(mapping.get("backend"))
    mapping, notes = defaults(mapping, os.environ)
    for note in notes:
        log.info("%s", note)
    parallel = vllm_config.parallel_config
    config = located(ConnectorConfig.from_mapping(mapping), parallel)
    check_hosts(config.legacy_hosts)
    for tier in config.secondary_tiers:
        ports = tier.get("control_ports")
        if not isinstance(ports, list) or str(config.port) not in map(str, ports):
            log.warning(
                "Dynamo's router is told to ask this engine at %s (control_ports of secondary_tiers), where its directory is not: "
                "list there the setting 'port' of each data-parallel rank",
                ports,
            )
    model = vllm_config.model_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1 and transfer.is_kv_consumer:
        raise ConfigError(
            "kvxfer does not load into an engine with prefill context parallelism; set prefill_context_parallel_size to 1, or "
            "kv_role to kv_producer"
        )
    if getattr(getattr(vllm_config, "aux_output_config", None), "enable_return_routed_experts", False):
        if transfer.is_kv_consumer:
            raise ConfigError(
                "kvxfer does not load into an engine with --enable-return-routed-experts: which experts have computed a prompt is known "
                "only where it was computed; drop the flag, or set kv_role to kv_producer"
            )
    if getattr(model, "enable_sleep_mode", False) and not internals.FOLLOWS_SLEEP:
        raise ConfigError(
            "kvxfer does not support the sleep mode of this vLLM, which takes the cache's memory away without telling "
            "connectors; use vLLM 0.33 or later, or do not set --enable-sleep-mode"
        )
    if getattr(model, "is_encoder_decoder", False):
        raise ConfigError("kvxfer does not support encoder-decoder models: it does not move cross-attention caches")
    return config


def check_backend(transfer: Any, translated: Translate) -> Mapping[str, Any]:
    """Check that the back end that the settings name is there; return the settings, which are checked no further.

    Raises:
        ConfigError: It is not installed, or a setting is wrong.
    """
    if transfer is None:
        return {}
    mapping, _ = translated(transfer.kv_connector_extra_config or {}, transfer)
    check_installed(mapping.get("backend"))
    return mapping


def check_installed(backend: object) -> None:
    """Check that a back end is there.

    Raises:
        ConfigError: It is not installed, or cannot be loaded.
    """
    if isinstance(backend, str) and backend not in ("", AUTO):
        registry.load(backend)


def groups_of(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[Group, ...]:
    """Return the engine's KV-cache groups as the schedule knows them.

    Raises:
        ConfigError: One is of an unsupported kind.
    """
    pages = group_pages(kv_cache_config, turn_takers(vllm_config))
    for i, group in enumerate(pages):
        if group.group.kind == "state":
            check_spec(i, group.specs[0])
    return tuple(group.group for group in pages)


def hits_may_differ(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether vLLM may count as cached what its full attention has, though the state there is gone.

    It may if the rest is loaded, as every load brings the state. Not if there is a sliding window too: a load brings only
    the part of it after the hit.
    """
    pages = group_pages(kv_cache_config)
    if not any(hasattr(spec, "mamba_type") for group in pages for spec in group.specs):
        return False  # what else is a state is gone at any hit
    full = {group.specs for group in pages if group.group.kind == "full"}
    return {group.group.kind for group in pages} == {"full", "state"} and len(full) == 1


def check_enclosure(vllm_config: VllmConfig) -> None:
    """Check what a ``MultiConnector`` around this connector is told; warn of settings of kvxfer's that vLLM gives to no connector.

    Raises:
        ConfigError: kvxfer stands in it twice.
    """
    kinds = [kind for kind in together(vllm_config) if _is_ours(kind)]
    if len(kinds) > 1:
        raise ConfigError(
            f"kvxfer stands {len(kinds)} times in 'connectors' of MultiConnector, and an engine can have it once: remove all but one entry"
        )
    if not kinds:
        return
    astray = sorted(
        engine_transfer(vllm_config).kv_connector_extra_config.keys() & set(ConnectorConfig.__struct_fields__)
    )
    if astray:
        log.warning(
            "kv_connector_extra_config of MultiConnector has %s, which vLLM gives to no connector: move it into kv_connector_extra_config "
            "of kvxfer's entry in 'connectors'",
            ", ".join(astray),
        )


def enclosed(config: ConnectorConfig, vllm_config: VllmConfig) -> ConnectorConfig:
    """Return the settings of a scheduler side, as they are where it stands; warn of what its operator may not expect there."""
    own, engine = vllm_config.kv_transfer_config, engine_transfer(vllm_config)
    if own is None or not own.is_kv_consumer:
        return config
    if not engine.is_kv_consumer:
        log.warning(
            "this engine loads nothing: kv_role of its MultiConnector is %s, so vLLM gives blocks away that a step still writes to; set "
            "it to kv_both",
            engine.kv_role,
        )
        return config
    if getattr(engine, "kv_load_failure_policy", None) == "fail":
        log.warning(
            "kv_load_failure_policy is 'fail', vLLM's default: a load that fails ends its request with an error (HTTP 500); with "
            "'recompute' this engine computes the prompt. Set it at the top: vLLM ignores it inside MultiConnector"
        )
    before = [kind.__name__ for kind in itertools.takewhile(lambda kind: not _is_ours(kind), together(vllm_config))]
    if not before:
        return config
    log.warning(
        "MultiConnector asks %s before kvxfer: if it has any tokens of a prompt, vLLM loads those and computes the rest. Put kvxfer first "
        "in 'connectors'",
        ", ".join(before),
    )
    # What is fetched before vLLM says whom it loads from may be fetched in vain.
    return msgspec.structs.replace(config, step_budget=0.0)


class EngineSetup:
    """What one engine is, and what it may offer, load and ask for, by its settings, its role and its model.

    Attributes:
        config: Its settings, as they are where it stands.
        groups, blocks: Its KV-cache groups, and how many blocks its cache has.
        replayed: The groups of which the window behind a prefix is computed again.
        writes_early: Whether new blocks may be written to before a step's hooks are called.
        produces, consumes, trusts: Whether it offers, loads, and asks whom a request names.
        among_several: Whether other connectors stand beside this one.
        spread: Whether vLLM may give the prompts of one HTTP request to several engines.
        computed: How many tokens at the end of a prompt it computes itself.
        partly: Whether a part of what a load was to bring is of use: where a table is of one row.
    """

    def __init__(self, config: ConnectorConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        assert transfer is not None
        self.config, self.engine = enclosed(config, vllm_config), str(transfer.engine_id)
        self.tp: int = parallel.tensor_parallel_size
        self.ranks: int = parallel.world_size
        self.groups, self.blocks = groups_of(kv_cache_config, vllm_config), kv_cache_config.num_blocks
        self.block_tokens = self.groups[0].block_tokens
        replayed = (replays(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
        self.replayed = tuple(itertools.compress(self.groups, replayed))
        # Model runner 2 zeroes such a cache's new blocks, or copies states into them, before it calls ``handle_preemptions``. Model
        # runner 1 calls that first, and in any other cache both write to new blocks in the forward pass only, which comes later.
        self.writes_early = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        self.produces, self.consumes = transfer.is_kv_producer, loads_safely(vllm_config)
        self.trusts = bool(config.key_file) or config.peers is not None or config.trust_sources
        self.among_several = engine_transfer(vllm_config) is not transfer
        self.spread = spread_over_ranks(self.engine, parallel)
        self.recurrent = any(group.kind == "state" for group in self.groups)
        self.computed = 1 if self.recurrent else computed_anyway(vllm_config)
        self.partly = len(self.groups) == 1 and self.groups[0].kind == "full"


def computed_anyway(vllm_config: VllmConfig) -> int:
    """Return how many tokens at the end of a prompt every engine computes itself: the last one, for its logits.

    Of several MTP modules, all but the first write KV of drafts for the last tokens of the producer's prompt, which it never verifies.
    """
    lookahead: Any = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
    return max(1, int(lookahead) - 1)


def spread_over_ranks(engine: str, parallel: Any) -> bool:
    """Return whether vLLM's front end may give the requests of one HTTP request to several engines: its data-parallel ranks.

    It does not if something outside chooses the rank, each of which then has a front end of its own. vLLM lets a rank of a dense
    model believe that it is alone, but writes its number behind the engine's name.
    """
    several = parallel.data_parallel_size > 1 or engine.endswith(f"_dp{getattr(parallel, 'data_parallel_index', 0)}")
    return several and not getattr(parallel, "data_parallel_external_lb", False)


def _is_ours(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "kvxfer_vllm" for base in kind.__mro__)
