"""The scales by which a layer quantises what it caches.

They belong to the layer, not to its pages, but pages cannot be read without them. (Scales that are computed for each token
lie in the page beside it.)
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvxfer.errors import ConfigError

__all__ = ["scales_of"]

_HOLDERS = ("_k_scale", "_v_scale")


def scales_of(name: str, layer: Any, spec: Any) -> str:
    """Return what a layer's encoding says of its scales, such as ``/k=0.25,v=0.5``.

    Nothing where its cache is not quantised, or all scales lie in its pages.

    Raises:
        ConfigError: The scales are not known, or not fixed.
    """
    if getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE") == "NONE":
        return ""
    if layer is None:
        raise ConfigError(f"layer {name!r}: its cache is quantised, and the layer that has its scales cannot be found")
    if getattr(layer, "calculate_kv_scales", False):
        raise ConfigError(
            f"layer {name!r} computes the scales of its cache in its first forward pass, so each engine has its own: "
            "remove calculate_kv_scales, or use a checkpoint that holds scales"
        )
    held = {holder[1]: getattr(layer, holder) for holder in _HOLDERS if getattr(layer, holder, None) is not None}
    return "/" + ",".join(f"{what}={_told(scale)}" for what, scale in held.items()) if held else ""


def _told(scale: Any) -> str:
    """One number as it is, exactly; one for each of this rank's heads by a hash."""
    values = scale.detach().float().flatten().tolist() if hasattr(scale, "detach") else [float(scale)]
    if len(values) == 1:
        return repr(values[0])
    text = ",".join(map(repr, values))
    return f"{len(values)} by head, {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
