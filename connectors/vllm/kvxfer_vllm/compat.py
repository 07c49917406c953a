"""Differences between supported vLLM releases, detected by feature rather than by version number."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = [
    "FOLLOWS_SLEEP",
    "HIT_SOURCE",
    "TELLS_TURNS",
    "around_reset",
    "compute_anew",
    "correct",
    "stands_alone",
    "takes_loaded_windows",
]

FOLLOWS_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")
"""Whether vLLM announces that sleep mode unmaps the cache (0.33 and later); earlier releases unmap it during a transfer."""


def takes_loaded_windows() -> bool:
    """Return whether vLLM takes a window for whole that a load has brought, even if it computes it again behind other prefix hits."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return hasattr(Scheduler, "_load_restores_replay_window")


TELLS_TURNS = hasattr(KVCacheSpec, "dcp_sharded")
"""Whether a cache says if the ranks of decode context parallelism take turns with its tokens (0.31 and later)."""


def correct(output: Any, *, over: Set[str], still: Set[str]) -> None:
    """Add the loads ``over`` to a worker output, and remove the loads ``still`` running, before vLLM's scheduler reads it."""
    if over or still:
        output.finished_recving = (set(output.finished_recving or ()) | over) - still


def compute_anew(manager: Any, request: Any) -> None:
    """Have vLLM compute a request of which it is about to hear that its load is over: nothing of that has come.

    It then does what it would do about a failed load if its policy were to recompute, whatever the policy is.
    """
    request.num_computed_tokens = 0
    manager.free(request)


def around_reset(manager: Any, before: Callable[[], None], refused: Callable[[], None]) -> None:
    """Wrap the cache manager's ``reset_prefix_cache`` so that ``before`` runs first, and ``refused`` if nothing was reset.

    vLLM has no hook for this. With ``reset_running_requests`` it preempts all running requests and raises if a block is
    still in use, before the connector hears of the preemptions.
    """
    reset = manager.reset_prefix_cache

    def reset_prefix_cache() -> Any:
        before()
        done = reset()
        if not done:
            refused()
        return done

    manager.reset_prefix_cache = reset_prefix_cache


def stands_alone(connector: Any) -> bool:
    """Whether this is the worker process's connector, not one of several inside another."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


def _hit_source() -> Any:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


HIT_SOURCE = _hit_source()
"""Label of loaded tokens in vLLM's cache-hit metrics; None before 0.32."""
