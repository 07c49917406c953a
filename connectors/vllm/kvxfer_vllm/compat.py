"""What differs between the vLLM releases that are supported, found by looking, not by version number."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.outputs import KVConnectorOutput

from kvxfer.errors import ConfigError
from kvxfer.values import Group

__all__ = [
    "FOLLOWS_SLEEP",
    "HIT_SOURCE",
    "HOLDS_BLOCKS",
    "REPORTS_BY_REQUEST",
    "TELLS_HITS",
    "before_reset",
    "check_groups",
    "correct",
    "output_of",
    "stands_alone",
    "transfer_results",
]

_Results: Any = getattr(base, "KVConnectorTransferResults", None)

REPORTS_BY_REQUEST = _Results is not None
"""vLLM 0.30 and later take failed loads by request; 0.29 by block id, which is ambiguous with several groups."""


HOLDS_BLOCKS = REPORTS_BY_REQUEST and hasattr(base.KVConnectorBase_V1, "bind_gpu_block_pool")
"""Whether a load may be reported as failed while it still touches memory: we can keep its blocks, and vLLM takes others
when it computes the request anew (where it takes failed loads by block id, it goes on with the same)."""


TELLS_HITS = hasattr(base.KVConnectorBase_V1, "bind_kv_cache_manager")
"""vLLM 0.30 and later let us ask how much of a prompt is cached, so that a load that begins before its request's turn leaves that out."""


FOLLOWS_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")
"""vLLM 0.33 and later say when sleep mode takes the cache's memory away; before, it goes from under a transfer."""


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """Return what ``get_transfer_results`` returns (0.30 and later)."""
    return _Results(finished_sending=sent, finished_recving=received, failed_recving=failed)


def output_of(connector: Any, finished: set[str]) -> KVConnectorOutput:
    """Return what a worker's connector reports after a step, asked as this vLLM's model runner asks it."""
    if not REPORTS_BY_REQUEST:
        sent, received = connector.get_finished(finished)
        return KVConnectorOutput(sent, received, invalid_block_ids=connector.get_block_ids_with_load_errors())
    found = connector.get_transfer_results(finished)
    return KVConnectorOutput(
        found.finished_sending,
        found.finished_recving,
        failed_recving=found.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
    )


def correct(output: Any, *, over: Set[str], still: Set[str]) -> None:
    """Have vLLM's scheduler, which looks at this output after our hook, learn that some loads are over, and not that others are."""
    if over or still:
        output.finished_recving = (set(output.finished_recving or ()) | over) - still


def before_reset(manager: Any, call: Callable[[], None]) -> None:
    """Have ``call`` called before vLLM's cache manager drops what it has cached.

    No hook says so. With ``reset_running_requests`` vLLM preempts all that runs and, before it tells anybody, raises if a
    block is in use.
    """
    reset = manager.reset_prefix_cache

    def reset_prefix_cache() -> Any:
        call()
        return reset()

    manager.reset_prefix_cache = reset_prefix_cache


def stands_alone(connector: Any) -> bool:
    """Whether this is the worker process's connector, not one of several inside another."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


def check_groups(groups: Sequence[Group]) -> None:
    """Refuse what this release cannot do safely.

    Raises:
        ConfigError: There is such a group.
    """
    if REPORTS_BY_REQUEST:
        return
    if len(groups) > 1:
        raise ConfigError(
            f"this vLLM ends the engine when a load fails in a model with {len(groups)} KV-cache groups; "
            "use vLLM 0.30 or later"
        )
    if any(group.kind != "full" for group in groups):
        raise ConfigError(
            "this vLLM goes on with a wrong KV cache when a load fails in a model with a sliding window; "
            "use vLLM 0.30 or later"
        )


def _hit_source() -> Any:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


HIT_SOURCE = _hit_source()
"""How vLLM 0.32 and later label tokens that we bring."""
