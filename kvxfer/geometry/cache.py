"""A worker's KV cache as values: strided views with named axes over regions of memory.

Everything here is plain data that is sent to peers in a hello (msgspec). Nothing touches memory.

The axes of a view are *block, head, token* and the contiguous *unit* below them; *layer* and *plane* (``k``,
``v``, ``latent``, ``state`` ...) name the view itself. Head and token may be missing, and either may be
*opaque*: present in the content, but not to be cut. A CPU-attention page, packed for the instruction set, is
[block, head, opaque]; a Mamba page is [block, opaque].
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry.overlap import Strided, first_overlap
from kvxfer.geometry.region import Region, flat_starts
from kvxfer.geometry.tensor import HOST
from kvxfer.geometry.tensors import parts_of
from kvxfer.geometry.turns import TokenTurns
from kvxfer.geometry.view import MAX_LAYERS, View
from kvxfer.values import MAX_BANDS, Group, Rank

_MAX_BYTES = 1 << 60

# The cost of planning grows with these, and a description may come from a peer. A model has some hundred layers of a handful of
# planes each; the pattern of a plan has as many rows as one block has pieces.
_MAX_VIEWS, _MAX_REGIONS, _MAX_GROUPS = 512, 1 << 12, 128
_MAX_HEADS = 1 << 18
"""The most heads, counted once for each layer and plane."""
_MAX_CELLS = 1 << 22
"""The most pieces of content in one block of one view."""

_FIRST = Rank()


class Cache(msgspec.Struct, frozen=True):
    """Everything that a peer must know about a rank's cache to plan copies from it or into it.

    Attributes:
        regions: Registered memory, in the order of the flat offset space.
        groups: Groups of layers that share a block table.
        views: Planes of these groups.
        rank: Pipeline stage and tensor-parallel rank.
    """

    regions: Annotated[tuple[Region, ...], Meta(max_length=_MAX_REGIONS)]
    groups: Annotated[tuple[Group, ...], Meta(max_length=_MAX_GROUPS)]
    views: Annotated[tuple[View, ...], Meta(max_length=_MAX_VIEWS)]
    rank: Rank = Rank()

    def __post_init__(self) -> None:
        for name, kind in (("regions", Region), ("groups", Group), ("views", View)):
            values = getattr(self, name)
            if not isinstance(values, Iterable):
                raise ArgumentError(f"{name} must be a tuple of {kind.__name__}, not {arguments.describe(values)}")
            force_setattr(self, name, tuple(arguments.instance(f"{name}[{i}]", v, kind) for i, v in enumerate(values)))
        arguments.instance("rank", self.rank, Rank)

    @classmethod
    def of_tensors(
        cls,
        tensors: Any,
        dims: str | Mapping[str, str],
        *,
        encoding: str | None = None,
        group: Group | None = None,
        layers: Iterable[str] | None = None,
        heads: tuple[int, int] | None = None,
        rank: Rank = _FIRST,
        optional: bool = False,
        turns: TokenTurns | None = None,
    ) -> Cache:
        """Describe a cache of one group by the tensors that hold it, and keep those alive with it.

        A tensor is one of numpy or torch, or any object with ``__array_interface__``, ``__cuda_array_interface__`` or
        ``__dlpack__``. Its axes may be in any order and have gaps. ``a + b`` is the cache of both groups.

        Args:
            tensors: The tensors of each plane, by its name, as in ``{"k": [...], "v": [...]}``: one tensor, or a list with one
                for each layer. Without a mapping they belong to a plane ``kv``.
            dims: The meaning of the axes, in order, as in ``"block head token unit"``: ``block`` once, ``layer``, ``head``
                and ``token`` at most once, and ``unit`` for each axis that is never cut. Without ``head`` every
                tensor-parallel rank holds a replica. Without ``token`` a block is not cut. A mapping by plane if they differ.
            encoding: Whatever else the bytes depend on; by default the dtype's name.
            group: By default a ``full`` one, with as many tokens in a block as the axis ``token`` has on all ranks that take turns.
            layers: The layers' names; by default ``"0"``, ``"1"``, ... No name may occur in two groups of a cache.
            heads: ``(first, total)``: the index of the first head here, and the number of heads of the model; by default all
                heads are here.
            rank: Pipeline stage and tensor-parallel rank.
            optional: See ``View``.
            turns: See ``View``.

        Raises:
            ArgumentError: An argument is wrong, or ``check`` refuses the cache.
        """
        regions, of, views = parts_of(tensors, dims, encoding, group, layers, heads, optional, turns)
        cache = cls(regions, (of,), views, rank)
        cache.check()
        return cache

    def __add__(self, other: Cache) -> Cache:
        """Return the cache that has the groups of this one, then those of ``other``, which must be of the same rank."""
        arguments.instance("other", other, Cache)
        if self.rank != other.rank:
            raise ArgumentError(f"rank must be the same in both caches, and {self.rank} is not {other.rank}")
        regions = self.regions + other.regions
        shift = flat_starts(regions)[len(self.regions)] if other.regions else 0
        moved = tuple(
            msgspec.structs.replace(
                v, group=v.group + len(self.groups), offsets=tuple(offset + shift for offset in v.offsets)
            )
            for v in other.views
        )
        return Cache(regions, self.groups + other.groups, self.views + moved, self.rank)

    @property
    def elastic(self) -> bool:
        """Whether any of its pages may be unmapped, and others mapped in their place, while it is registered."""
        return any(region.elastic for region in self.regions)

    @property
    def starts(self) -> tuple[int, ...]:
        """The flat offset at which each region begins. Regions are laid out in order, at least ``GAP`` bytes apart."""
        return flat_starts(self.regions)

    def told(self) -> Cache:
        """Return what peers are told of this cache: all but where in this process its regions lie, which is 0 there.

        A side that plans copies needs no addresses, and nobody else should have them.
        """
        return msgspec.structs.replace(
            self, regions=tuple(msgspec.structs.replace(region, address=0) for region in self.regions)
        )

    def check(self) -> None:
        """Refuse a malformed description. Call it once for a cache that came from a peer, before planning with it.

        It takes only milliseconds, whatever it is given. Views of different groups may occupy the same memory if these
        share one pool of blocks, each of which is in the table of one group only.

        Raises:
            ArgumentError: A number is impossible, a view leaves its region, or two pieces of content of one group share bytes.
                Or the description is larger than any engine's, or its planes interleave in a way that no engine
                uses and that would take long to check.
        """
        self._check_size()
        for i, r in enumerate(self.regions):
            if r.address < 0 or not 0 < r.nbytes <= _MAX_BYTES:
                raise ArgumentError(f"region {i}: {r.nbytes} bytes at {r.address} is not a piece of memory")
            if r.device != HOST and (r.kind == HOST or not r.device.removeprefix(f"{r.kind}:").isdecimal()):
                raise ArgumentError(
                    f"region {i}: device must be {HOST!r}, or a kind of device and a number, not {arguments.describe(r.device)}"
                )
        if sum(r.nbytes for r in self.regions) > _MAX_BYTES:
            raise ArgumentError("the regions together are larger than any memory")
        for g, group in enumerate(self.groups):
            if group.kind == "local":
                raise ArgumentError(f"group {g}: a local group is never moved, so peers must not see it")
        starts = self.starts
        for v in self.views:
            self._check_view(v, starts)
        self._check_overlaps()

    def _check_size(self) -> None:
        """Refuse a description larger than any engine's, before doing anything whose cost grows with it."""
        for what, n, most in (
            ("regions", len(self.regions), _MAX_REGIONS),
            ("groups", len(self.groups), _MAX_GROUPS),
            ("views", len(self.views), _MAX_VIEWS),
            ("layers, counted for each plane,", sum(len(v.layers) for v in self.views), MAX_LAYERS),
            (
                "heads, counted for each layer and plane,",
                sum(len(v.layers) * v.heads.count for v in self.views if v.heads is not None),
                _MAX_HEADS,
            ),
        ):
            if n > most:
                raise ArgumentError(f"{n} {what} are more than {most}")

    def _check_view(self, v: View, starts: tuple[int, ...]) -> None:
        what = f"view {v.plane!r} of group {v.group}"
        if not 0 <= v.group < len(self.groups):
            raise ArgumentError(f"{what}: no such group; there are {len(self.groups)}")
        group = self.groups[v.group]
        if len(v.layers) != len(v.offsets) or not v.layers or len(set(v.layers)) != len(v.layers):
            raise ArgumentError(f"{what}: needs one offset for each of its (distinct) layers")
        if min(v.blocks, v.unit, v.block_stride) <= 0:
            raise ArgumentError(f"{what}: blocks, unit and block_stride must be positive")
        if v.heads is not None and not 0 <= v.heads.start < v.heads.start + v.heads.count <= v.heads.total:
            raise ArgumentError(f"{what}: heads {v.heads} are not a range within the total")
        if group.kind == "state" and v.token_stride is not None:
            raise ArgumentError(f"{what}: a state has no token axis; leave token_stride out")
        if v.turns is not None:
            if group.kind == "state":
                raise ArgumentError(f"{what}: a state has no tokens to take turns with; leave turns out")
            if group.block_tokens % (v.turns.count * v.turns.span):
                raise ArgumentError(
                    f"{what}: blocks of {group.block_tokens} tokens do not hold whole rounds of {v.turns.count} turns of "
                    f"{v.turns.span} tokens"
                )
        cells = len(v.layers)
        for n, stride in v.axes(group.block_tokens):
            cells *= n
            if stride <= 0:
                raise ArgumentError(f"{what}: strides must be positive, not {stride}")
        if cells > _MAX_CELLS:
            raise ArgumentError(f"{what}: {cells} pieces in one block are more than {_MAX_CELLS}")
        extent = v.extent(group.block_tokens)
        for layer, offset in zip(v.layers, v.offsets, strict=True):
            r = bisect_right(starts, offset) - 1
            if r < 0 or offset + extent > starts[r] + self.regions[r].nbytes:
                raise ArgumentError(f"{what}: layer {layer!r} at {offset} (+{extent} bytes) leaves every region")

    def _check_overlaps(self) -> None:
        seen: set[tuple[str, str]] = set()
        for v in self.views:
            for layer in v.layers:
                if (v.plane, layer) in seen:
                    raise ArgumentError(
                        f"plane {v.plane!r} of layer {layer!r} is described twice; name the layers of each group apart"
                    )
                seen.add((v.plane, layer))
        of_group: dict[int, list[View]] = defaultdict(list)
        for v in self.views:
            of_group[v.group].append(v)
        found = first_overlap([[self._strided(v) for v in views] for views in of_group.values()])
        if found is not None:
            g, views = list(of_group.items())[found[0]]
            one, other = (views[i].plane for i in found[1:])
            raise ArgumentError(f"group {g}: content of planes {one!r} and {other!r} lies in the same bytes")

    def _strided(self, v: View) -> Strided:
        n = self.groups[v.group].block_tokens
        return Strided(v.offsets, v.axes(n), v.unit, v.block_stride, v.blocks, v.extent(n))


def bands(cache: Cache) -> tuple[frozenset[str], ...]:
    """Divide the layers of all ``full`` groups, in the order of the cache, into up to eight ranges of about equal length.

    The KV of one band may move while the next is computed. Both sides of a link divide the producer's cache in the same way, so that
    messages name a band by its index alone. Layers of other groups belong to no band, because their content is complete only once the
    whole prompt is.

    Args:
        cache: The cache of a producer rank. Unless its layers are in the order in which they are computed, bands are of little use.
    """
    kept = (v.layers for v in cache.views if cache.groups[v.group].kind == "full")
    layers = list(dict.fromkeys(layer for view in kept for layer in view))
    n = min(MAX_BANDS, len(layers))
    ends = [len(layers) * i // n for i in range(n + 1)] if n else [0]
    return tuple(frozenset(layers[lo:hi]) for lo, hi in zip(ends, ends[1:], strict=False))
