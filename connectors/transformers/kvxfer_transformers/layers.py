"""What the layers of a ``transformers`` cache keep, found out by having the model write one token.

Each model declares its attention in its own way: heads by layer, a latent instead of keys and values, windows. So this does not
read configurations, but looks at what the model puts into an empty cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvxfer.errors import KvxferError

__all__ = ["LayerForm", "UnsupportedCacheError", "check_layers", "forms_of", "held", "kept"]

_KNOWN = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class UnsupportedCacheError(KvxferError):
    """A cache, model or input is of a kind that is not supported. The message says what can be done."""


@dataclass(frozen=True)
class LayerForm:
    """What one layer keeps of each token, and of how many tokens.

    ``index`` is its place in the cache. ``window`` is the most tokens that a token attends to, itself included; 0 without such a
    limit. ``heads`` and ``dims`` (elements of a head) are pairs, for keys and for values.
    """

    index: int
    window: int
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype


def forms_of(model: Any) -> tuple[LayerForm, ...]:
    """Return the form of each layer of the model that keeps KV; layers that use another layer's KV are left out.

    Raises:
        UnsupportedCacheError: The model, or what one of its layers keeps, is of a kind that is not supported.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedCacheError(
            f"{type(model).__name__} is an encoder-decoder, whose cross-attention cache is not moved: run it in one process"
        )
    cache = DynamicCache(config=model.config)
    check_layers(cache)
    try:
        with torch.no_grad():
            model(torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    except Exception as error:
        raise UnsupportedCacheError(
            f"{type(model).__name__} cannot compute a single token from its id ({error!r}): pass only the text model"
        ) from error
    forms = tuple(
        LayerForm(
            index,
            int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0,
            (layer.keys.shape[1], layer.values.shape[1]),
            (layer.keys.shape[-1], layer.values.shape[-1]),
            layer.keys.dtype,
        )
        for index, layer in _filled(cache)
    )
    if not forms:
        raise UnsupportedCacheError(
            f"{type(model).__name__} keeps no keys or values in its cache: there is nothing to move"
        )
    return forms


def held(cache: Any, forms: tuple[LayerForm, ...]) -> int:
    """Return how many tokens a cache of the model with these forms holds.

    Raises:
        UnsupportedCacheError: The cache is of a kind that is not supported, is not of this model, or holds nothing.
    """
    check_layers(cache)
    filled = dict(_filled(cache))
    if filled.keys() != {form.index for form in forms}:
        raise UnsupportedCacheError(
            f"the cache holds KV of {len(filled)} layers and the model keeps it in {len(forms)}: "
            "pass the cache of this exchange's model, after its forward pass"
        )
    for form in forms:
        layer = filled[form.index]
        found = ((layer.keys.shape[1], layer.values.shape[1]), (layer.keys.shape[-1], layer.values.shape[-1]))
        if found != (form.heads, form.dims) or layer.keys.dtype != form.dtype:
            raise UnsupportedCacheError(
                f"layer {form.index} of the cache is not as this model writes it: {found} of {layer.keys.dtype} instead of "
                f"{(form.heads, form.dims)} of {form.dtype}: pass the cache of this exchange's model"
            )
    return int(cache.get_seq_length())


def kept(cache: Any, form: LayerForm, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values that a layer keeps of a row of the batch, [heads, tokens, dim] each, of its last tokens."""
    layer = cache.layers[form.index]
    keys, values = layer.keys[row], layer.values[row]
    if isinstance(layer, StaticLayer):
        tokens = min(int(layer.get_seq_length()), layer.max_cache_len)
        keys, values = keys[:, :tokens], values[:, :tokens]
    return keys, values


def check_layers(cache: Any) -> None:
    """Refuse what is not a cache, or has layers that keep something other than keys and values.

    Raises:
        UnsupportedCacheError: It is of a kind that is not supported.
    """
    if isinstance(cache, EncoderDecoderCache):
        raise UnsupportedCacheError("an EncoderDecoderCache is not moved: run encoder-decoder models in one process")
    if not isinstance(cache, Cache):
        raise UnsupportedCacheError(
            f"a {type(cache).__name__} is not a transformers Cache: pass the past_key_values that generate() returned"
        )
    for layer in cache.layers:
        _check(layer)


def _filled(cache: Any) -> Iterator[tuple[int, Any]]:
    return ((i, layer) for i, layer in enumerate(cache.layers) if layer.is_initialized and layer.keys.numel())


def _check(layer: Any) -> None:
    if type(layer) in _KNOWN:
        return
    name = type(layer).__name__
    if isinstance(layer, QuantizedLayer):
        advice = "quantised caches are not moved; use a DynamicCache or a StaticCache"
    elif isinstance(layer, LinearAttentionCacheLayerMixin):
        advice = "states of linear attention, convolutions and state-space layers are not moved; run such models in one process"
    else:
        advice = "known are " + ", ".join(known.__name__ for known in _KNOWN)
    raise UnsupportedCacheError(f"the cache has a {name}: {advice}")
