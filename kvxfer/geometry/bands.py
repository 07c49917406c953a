"""Bands: a cache's layers in a few ranges, so that the KV of one may move while the next is computed.

Both sides of a link divide the producer's cache in the same way, so that a band needs no more than its number to be spoken of.
"""

from __future__ import annotations

from kvxfer.geometry.cache import Cache
from kvxfer.values import MOST_BANDS

__all__ = ["bands"]


def bands(cache: Cache) -> tuple[frozenset[str], ...]:
    """Divide the layers of the groups of kind ``full`` by their order in the cache, into ranges of about as many layers.

    Layers of other groups are in none: what these hold is complete only once a prompt is.

    Args:
        cache: That of a producer rank. Where its layers are not in the order in which they are computed, bands are of little use.
    """
    kept = (v.layers for v in cache.views if cache.groups[v.group].kind == "full")
    layers = list(dict.fromkeys(layer for view in kept for layer in view))
    n = min(MOST_BANDS, len(layers))
    ends = [len(layers) * i // n for i in range(n + 1)] if n else [0]
    return tuple(frozenset(layers[lo:hi]) for lo, hi in zip(ends, ends[1:], strict=False))
