"""Bands: a few ranges of a cache's layers, so that the KV of one band may move while the next is computed.

Both sides of a link divide the producer's cache in the same way, so that messages name a band by its index alone.
"""

from __future__ import annotations

from kvxfer.geometry.cache import Cache
from kvxfer.values import MAX_BANDS


def bands(cache: Cache) -> tuple[frozenset[str], ...]:
    """Divide the layers of all ``full`` groups, in the order of the cache, into up to eight ranges of about equal length.

    Layers of other groups belong to no band, because their content is complete only once the whole prompt is.

    Args:
        cache: The cache of a producer rank. Unless its layers are in the order in which they are computed, bands are of little use.
    """
    kept = (v.layers for v in cache.views if cache.groups[v.group].kind == "full")
    layers = list(dict.fromkeys(layer for view in kept for layer in view))
    n = min(MAX_BANDS, len(layers))
    ends = [len(layers) * i // n for i in range(n + 1)] if n else [0]
    return tuple(frozenset(layers[lo:hi]) for lo, hi in zip(ends, ends[1:], strict=False))
