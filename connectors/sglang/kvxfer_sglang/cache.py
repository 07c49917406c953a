"""SGLang's KV pool as kvxfer sees it: pages of tokens, of keys and values or of latents, and what SGLang calls states.

SGLang describes a pool by the first byte, the length and the bytes of a page of each buffer: the keys of all layers, then
the values; or the latents. The buffers of a draft model follow; they have the same pages. A page lies in one
piece, token by token, and in it head by head. The buffers of states come in lists of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from kvxfer import Cache, Rank
from kvxfer.geometry import Heads, Region, View
from kvxfer.geometry.region import flat_starts
from kvxfer_sglang.recurrent import recurrent_views
from kvxfer_sglang.states import MAMBA, SWA, PoolBuffer, States
from kvxfer_sglang.support import UnsupportedSetupError


def heads_of(rank: int, ranks: int, total: int) -> tuple[int, int, int]:
    """Return the first KV head of a rank, of the ranks that share the attention; how many it has; and how many the model has.

    Where there are more ranks than heads, neighbours have the same one.
    """
    return rank * total // ranks, max(1, total // ranks), total


def stage_layers(model: Any, stage: int, stages: int) -> range:
    """Return the layers of a pipeline stage, from 0, as SGLang itself shares a model out. ``model``: SGLang's ``ModelConfig``."""
    from sglang.srt.distributed.utils import get_pp_indices

    return range(*get_pp_indices(model.num_hidden_layers, stage, stages))


def host_args(args: Any) -> Any | None:
    """Return SGLang's ``KVArgs`` of the host pool, into which decode may receive; ``None`` if there is none.

    It has the layout of the pool on the device, but not as many pages.
    """
    if not args.host_kv_data_ptrs:
        return None
    host = copy(args)
    for kind in ("data_ptrs", "data_lens", "item_lens"):
        setattr(host, f"kv_{kind}", getattr(args, f"host_kv_{kind}"))
        setattr(host, f"state_{kind}", getattr(args, f"host_state_{kind}") or [])
    return host


def pool_cache(
    args: Any,
    heads: tuple[int, int, int] | None,
    rank: Rank,
    ranks: int,
    device: str,
    layers: range | None = None,
    window_heads: tuple[int, int, int] | None = None,
) -> Cache:
    """Return the description of a pool for other engines.

    Args:
        args: SGLang's ``KVArgs``.
        heads: The first KV head that is here, how many are here, and how many the model has; ``None`` for latents.
        rank: The pipeline stage, and the attention's tensor-parallel rank.
        ranks: How many ranks share the attention.
        device: Where the pool lies, as kvxfer names devices.
        layers: The layers of the stage, where SGLang's ``KVArgs`` do not say them.
        window_heads: As ``heads``, of layers with a sliding window.

    Raises:
        UnsupportedSetupError: The buffers are not laid out so.
    """
    states = States.of(args)
    told = [(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)]
    told += zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    # A layer may have none of a kind of state, and an empty buffer for it.
    regions = tuple(Region(p, n, device) for ptrs, lens, _ in told for p, n in zip(ptrs, lens, strict=True) if n)
    starts = iter(flat_starts(regions))
    kv, *of_states = (
        [PoolBuffer(next(starts) if n else 0, n, item) for n, item in zip(lens, items, strict=True)]
        for _, lens, items in told
    )
    count = len(kv) - args.num_draft_entries
    first = getattr(args, "prefill_start_layer", 0)  # of a stage; SGLang says it where it prefills
    per_plane = count // (2 if heads else 1)
    named = layers or range(first, first + per_plane)
    names = list(map(str, args.kv_layer_ids[:count] or [*named] * (2 if heads else 1)))
    views = list(_attention(args, kv[:count], names, heads, 0))
    views += [_draft_view(args, buffer, i, rank.tp, ranks) for i, buffer in enumerate(kv[count:])]
    for i, (kind, buffers) in enumerate(zip(states.kinds, of_states, strict=True)):
        group = states.group(kind)
        if kind == SWA:
            window = [f"window.{i}" for i in range(len(buffers) // 2)] * 2
            views += _attention(args, buffers, window, window_heads, group)
        elif kind == MAMBA:
            views += recurrent_views(args, i, buffers, group, rank.tp, ranks, device)
        else:
            views += _index(buffers, args, group, named.start)
    cache = Cache(regions, states.groups, tuple(views), rank)
    cache.check()
    return cache


def _attention(
    args: Any, buffers: Sequence[PoolBuffer], names: Sequence[str], heads: tuple[int, int, int] | None, group: int
) -> Iterator[View]:
    """Yield the planes of some layers."""
    planes = ("k", "v") if heads else ("latent",)
    if not buffers or len(buffers) % len(planes) or len(names) != len(buffers):
        raise UnsupportedSetupError(
            f"a KV pool of {len(buffers)} buffers does not have {' and '.join(planes)} for each of {len(names) // len(planes)} layers"
        )
    layers = len(buffers) // len(planes)
    for side, plane in enumerate(planes):
        own = slice(side * layers, (side + 1) * layers)
        pages = {buffer.item for buffer in buffers[own]}
        cut = args.page_size * (heads[1] if heads else 1)
        page = min(pages)
        if len(pages) > 1 or not page or page % cut:
            raise UnsupportedSetupError(
                f"pages of {sorted(pages)} bytes are not of one size in all layers, or cannot be divided into {cut} equal pieces"
            )
        unit = page // cut
        yield View(
            plane=plane,
            group=group,
            layers=tuple(names[own]),
            offsets=tuple(buffer.start for buffer in buffers[own]),
            blocks=min(buffer.nbytes for buffer in buffers[own]) // page,
            block_stride=page,
            unit=unit,
            encoding=args.kv_cache_dtype_str,
            heads=Heads(*heads, stride=unit) if heads else None,
            token_stride=page // args.page_size,
        )


def _draft_view(args: Any, buffer: PoolBuffer, number: int, rank: int, ranks: int) -> View:
    """Return what one buffer of the draft model is.

    SGLang does not say which heads a draft model has. So a rank's share counts as one head of as many as there are ranks: it
    moves whole, between servers with equally many ranks, and any others are refused.
    """
    if buffer.item % args.page_size:
        raise UnsupportedSetupError(
            f"a draft model's page of {buffer.item} bytes cannot be divided into {args.page_size} equal tokens"
        )
    unit = buffer.item // args.page_size
    return View(
        plane="draft",
        group=0,
        layers=(str(number),),
        offsets=(buffer.start,),
        blocks=buffer.nbytes // buffer.item,
        block_stride=buffer.item,
        unit=unit,
        encoding=args.kv_cache_dtype_str,
        heads=Heads(rank, 1, ranks, stride=unit),
        token_stride=unit,
    )


def _index(buffers: Sequence[PoolBuffer], args: Any, group: int, first: int) -> Iterator[View]:
    """Yield the index of sparse attention. Its pages hold all keys and then all their scales, so they are not cut.

    Each layer has a buffer, the ``first`` one of the stage in front; behind them are those of a draft model.
    """
    alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for i, buffer in enumerate(buffers):
        if buffer.nbytes:
            alike[buffer.item, buffer.nbytes].append(i)
    for (item, nbytes), of in alike.items():
        yield View(
            plane="index",
            group=group,
            layers=tuple(str(first + i) for i in of),
            offsets=tuple(buffers[i].start for i in of),
            blocks=nbytes // item,
            block_stride=item,
            unit=item,
            encoding=args.kv_cache_dtype_str,
        )
