"""Prefill in one process and decode in another, with transformers.

``CacheExchange`` moves what ``model.generate`` keeps in its ``past_key_values``; ``BatchingExchange`` does the same for
transformers' continuous batching. Both name what they offer by a ticket: a text, which whoever routes requests hands to
the process that decodes.
"""

from kvxfer_transformers.batching import BatchingExchange
from kvxfer_transformers.exchange import CacheExchange
from kvxfer_transformers.layers import UnsupportedCacheError

__all__ = ["BatchingExchange", "CacheExchange", "UnsupportedCacheError"]
