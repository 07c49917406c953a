"""Prefill in one process and decode in another, with transformers.

``CacheExchange`` moves what ``model.generate`` keeps in its ``past_key_values``; ``BatchingExchange`` does the same for
transformers' continuous batching. Both name what they offer by a ticket: a text that your router hands to the process that
decodes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer_transformers.batching import BatchingExchange
    from kvxfer_transformers.exchange import CacheExchange
    from kvxfer_transformers.layers import UnsupportedCacheError

__all__ = ["BatchingExchange", "CacheExchange", "UnsupportedCacheError"]

_HOMES = {"BatchingExchange": "batching", "CacheExchange": "exchange", "UnsupportedCacheError": "layers"}


def __getattr__(name: str) -> Any:
    """Import transformers only when a name is used that needs it, so that `kvxfer demo` need not."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
