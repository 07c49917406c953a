"""SGLang's KV pool as kvxfer sees it: pages of tokens, of keys and values or of latents.

SGLang describes a pool by the first byte, the length and the bytes of a page of each buffer: the keys of all layers, then
the values; or the latents; then, where there is a draft model, its buffers, which have the same pages. A page lies in one
piece, token by token, and in it head by head.
"""

from __future__ import annotations

from typing import Any

from kvxfer import Cache, Group, Rank
from kvxfer.geometry import Heads, Region, View
from kvxfer.geometry.cache import flat_starts
from kvxfer_sglang.support import UnsupportedSetupError

__all__ = ["heads_of", "pool_cache"]


def heads_of(rank: int, ranks: int, total: int) -> tuple[int, int, int]:
    """Return the first KV head of a rank, how many it has, and how many the model has.

    Where there are more ranks than heads, neighbours have the same one.

    Args:
        rank: Among the ranks that share the attention.
        ranks: How many these are.
        total: KV heads of the model.
    """
    return rank * total // ranks, max(1, total // ranks), total


def pool_cache(args: Any, heads: tuple[int, int, int] | None, rank: Rank, ranks: int, device: str) -> Cache:
    """Return what others must know of a pool.

    Args:
        args: SGLang's ``KVArgs``.
        heads: The first KV head that is here, how many are here, and how many the model has; ``None`` for latents.
        rank: The pipeline stage, and the attention's tensor-parallel rank.
        ranks: How many ranks share the attention.
        device: Where the pool lies, as kvxfer names devices.

    Raises:
        UnsupportedSetupError: The buffers are not laid out so.
    """
    planes = ("k", "v") if heads else ("latent",)
    count = len(args.kv_data_ptrs) - args.num_draft_entries
    if count <= 0 or count % len(planes):
        raise UnsupportedSetupError(f"a KV pool of {count} buffers has no {' and '.join(planes)} of each layer")
    regions = tuple(Region(p, n, device) for p, n in zip(args.kv_data_ptrs, args.kv_data_lens, strict=True))
    starts = flat_starts(regions)
    layers = count // len(planes)
    first = getattr(args, "prefill_start_layer", 0)  # of a stage; SGLang says it where it prefills
    views = []
    for side, plane in enumerate(planes):
        own = slice(side * layers, (side + 1) * layers)
        pages = set(args.kv_item_lens[own])
        cut = args.page_size * (heads[1] if heads else 1)
        page = min(pages)
        if len(pages) > 1 or page % cut:
            raise UnsupportedSetupError(
                f"pages of {sorted(pages)} bytes are not {cut} alike pieces of one size in each layer"
            )
        unit = page // cut
        views.append(
            View(
                plane=plane,
                group=0,
                layers=tuple(map(str, args.kv_layer_ids[own] or range(first, first + layers))),
                offsets=starts[own],
                blocks=min(region.nbytes for region in regions[own]) // page,
                block_stride=page,
                unit=unit,
                encoding=args.kv_cache_dtype_str,
                heads=Heads(*heads, stride=unit) if heads else None,
                token_stride=page // args.page_size,
            )
        )
    views += [_draft_view(args, i, i - count, starts[i], rank.tp, ranks) for i in range(count, len(regions))]
    cache = Cache(regions, (Group(args.page_size),), tuple(views), rank)
    cache.check()
    return cache


def _draft_view(args: Any, buffer: int, number: int, start: int, rank: int, ranks: int) -> View:
    """Return what one buffer of the draft model is.

    SGLang does not say what heads a draft model has. So a rank's share counts as one of as many as there are ranks: it moves
    whole, between equal numbers of ranks, and others are refused.
    """
    page = args.kv_item_lens[buffer]
    if page % args.page_size:
        raise UnsupportedSetupError(f"a draft model's page of {page} bytes is not {args.page_size} alike tokens")
    unit = page // args.page_size
    return View(
        plane="draft",
        group=0,
        layers=(str(number),),
        offsets=(start,),
        blocks=args.kv_data_lens[buffer] // page,
        block_stride=page,
        unit=unit,
        encoding=args.kv_cache_dtype_str,
        heads=Heads(rank, 1, ranks, stride=unit),
        token_stride=unit,
    )
