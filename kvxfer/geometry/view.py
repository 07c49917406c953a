"""One plane of a group's layers as a strided view with named axes: values that are sent to peers, and touch nothing."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry.region import take_integers
from kvxfer.geometry.turns import ALL, TokenTurns

MAX_LAYERS = 1 << 12
"""The most layers of a cache, counted once for each plane."""

_Name = Annotated[str, Meta(max_length=1 << 12)]


class Heads(msgspec.Struct, frozen=True):
    """The head axis of a view: this rank holds the global KV heads ``[start, start + count)`` of ``total``.

    Attributes:
        start: First global head.
        count: Number of heads that this rank holds.
        total: Number of KV heads of the model.
        stride: Bytes from one head to the next; ``None`` if the heads lie inside the unit and must not be cut (opaque).
    """

    start: int
    count: int
    total: int
    stride: int | None

    def __post_init__(self) -> None:
        take_integers(self, "start", "count", "total")
        if self.stride is not None:
            take_integers(self, "stride")


class View(msgspec.Struct, frozen=True):
    """One plane of all layers of a group that share shape and strides.

    The ``unit`` bytes of (layer l, block b, head h, token t) begin at flat offset ``offsets[l] + b * block_stride + (h
    - heads.start) * heads.stride + t * token_stride``. Where ranks take turns, t counts the block's tokens that are here.

    Attributes:
        plane: ``k``, ``v``, ``latent``, ``state`` ...
        group: Index of the block table's group in ``Cache.groups``.
        layers: Names of the layers.
        offsets: Flat offset of block 0 of each layer, in bytes.
        blocks: Number of blocks.
        block_stride: Bytes from one block to the next.
        unit: Contiguous bytes of one head of one token, or of all that an opaque axis keeps together.
        encoding: Whatever else the bytes depend on (dtype, quantisation, packing and its instruction set, where scales
            live). It is compared, never interpreted.
        heads: The head axis; ``None`` if the content has none (MLA) and each tensor-parallel rank holds a replica.
        token_stride: Bytes from one token to the next; ``None`` if the tokens of a block lie inside the unit and must
            not be cut (opaque).
        optional: Whether a consumer can do without the content, as with the cache of a draft model: its guesses get worse,
            but the output stays the same. What no producer has in a convertible form is then not moved.
        turns: Which tokens this rank holds, if ranks spread the tokens of each block among them (context parallelism); ``None``
            if it holds them all.
    """

    plane: _Name
    group: int
    layers: Annotated[tuple[_Name, ...], Meta(max_length=MAX_LAYERS)]
    offsets: Annotated[tuple[int, ...], Meta(max_length=MAX_LAYERS)]
    blocks: int
    block_stride: int
    unit: int
    encoding: _Name
    heads: Heads | None = None
    token_stride: int | None = None
    optional: bool = False
    turns: TokenTurns | None = None

    def __post_init__(self) -> None:
        arguments.string("plane", self.plane, empty=True)
        arguments.string("encoding", self.encoding, empty=True)
        take_integers(self, "group", "blocks", "block_stride", "unit")
        if self.token_stride is not None:
            take_integers(self, "token_stride")
        if self.heads is not None:
            arguments.instance("heads", self.heads, Heads)
        if isinstance(self.layers, str) or not all(type(layer) is str for layer in self.layers):
            raise ArgumentError(f"layers must be a tuple of str, not {arguments.describe(self.layers)}")
        force_setattr(self, "layers", tuple(self.layers))
        force_setattr(self, "offsets", arguments.integers("offsets", self.offsets))
        force_setattr(self, "optional", arguments.flag("optional", self.optional))
        if self.turns is not None:
            arguments.instance("turns", self.turns, TokenTurns)

    @property
    def held(self) -> TokenTurns:
        """Which tokens this rank holds."""
        return ALL if self.turns is None or self.turns.count == 1 else self.turns

    def axes(self, block_tokens: int) -> list[tuple[int, int]]:
        """Return the axes within a block that can be cut, as (length, stride in bytes): heads, then tokens."""
        out = []
        if self.heads is not None and self.heads.stride is not None:
            out.append((self.heads.count, self.heads.stride))
        if self.token_stride is not None:
            out.append((self.tokens(block_tokens), self.token_stride))
        return out

    def tokens(self, block_tokens: int) -> int:
        """Return how many tokens of a block are here."""
        return block_tokens // self.turns.count if self.turns is not None else block_tokens

    def extent(self, block_tokens: int) -> int:
        """Return the bytes from a layer's offset to the end of its last block's content."""
        within = sum((n - 1) * stride for n, stride in self.axes(block_tokens))
        return (self.blocks - 1) * self.block_stride + within + self.unit
