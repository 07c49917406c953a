"""Describe vLLM's cache tensors as a kvxfer ``Cache``, from strides and specs; nothing is guessed from sizes.

vLLM hands out one ``[B, H, N, C]`` view for each layer (blocks, heads, tokens, content), whatever the
physical order; ``B`` counts kernel blocks, which may be smaller than the scheduler's logical blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache, Heads, Region, TokenTurns, View
from kvxfer.logs import logger
from kvxfer.values import NULL, BlockTable, Group, Ints, Rank
from kvxfer_vllm.internals import layer_of
from kvxfer_vllm.pages.forms import Form, encoding_of, form_of, indexer_rows, replicated, writer_of
from kvxfer_vllm.pages.groups import Piece, group_pages, state_pieces, takes_turns, total_heads

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logger("kvxfer.vllm")


def turn_takers(config: VllmConfig) -> int:
    """Return how many ranks take turns with tokens."""
    return int(getattr(config.parallel_config, "decode_context_parallel_size", 1))


def replicated_ranks(config: VllmConfig) -> bool:
    """Return whether ranks of prefill context parallelism hold the same.

    vLLM then tells its scheduler side of one of them alone, because it numbers them alike; their first reports tell of all.
    """
    return int(getattr(config.parallel_config, "prefill_context_parallel_size", 1)) > 1 and turn_takers(config) == 1


def rank_of(config: VllmConfig, stage: int, prefill: int, tensor: int) -> Rank:
    """Return the rank of a worker, by its places in its pipeline and in prefill context and tensor parallelism."""
    return Rank(stage, prefill * config.parallel_config.tensor_parallel_size + tensor)


@dataclass(frozen=True)
class Place:
    """What follows from a worker's rank."""

    tensor: Rank  # tensor-parallel rank, as a rank of this engine
    size: int  # tensor-parallel size
    turn: int  # its number among those that take turns
    ranks: int  # how many these are
    span: int  # the tokens of a turn

    @classmethod
    def of(cls, config: VllmConfig, rank: Rank) -> Self:
        """Return the place of the rank that ``rank_of`` has returned."""
        parallel: Any = config.parallel_config
        size, ranks = int(parallel.tensor_parallel_size), turn_takers(config)
        prefill, tensor = divmod(rank.tp, size)
        across = int(getattr(parallel, "prefill_context_parallel_size", 1))
        turn = (tensor * across + prefill) % ranks
        return cls(Rank(rank.pp, tensor), size, turn, ranks, int(getattr(parallel, "cp_kv_cache_interleave_size", 1)))

    def turns(self, spec: Any) -> TokenTurns | None:
        """Return which tokens of such a cache this rank has; ``None`` for all."""
        return TokenTurns(self.turn, self.ranks, self.span) if self.ranks > 1 and takes_turns(spec) else None


def draft_of(layer: str, config: VllmConfig) -> str:
    """Return a text that identifies the draft model that a layer belongs to; empty for a layer of the served model."""
    spec = getattr(config, "speculative_config", None)
    draft = getattr(spec, "draft_model_config", None)
    if spec is None or draft is None:
        return ""
    parts = layer.split(".")
    number = next((int(part) for part in parts if part.isdigit()), -1)
    if parts[0] != "draft_model" and number < config.model_config.get_total_num_hidden_layers():
        return ""
    shape = json.dumps(draft.hf_config.to_dict(), sort_keys=True, default=str)
    return f"{spec.method}-{hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()}"


@dataclass(frozen=True)
class Layout:
    """A worker's cache, and for each group how many kernel blocks a logical block holds."""

    cache: Cache
    ratios: tuple[int, ...]

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], kv: KVCacheConfig, config: VllmConfig, rank: Rank) -> Layout:
        """Describe the tensors that ``register_kv_caches`` was given.

        Raises:
            ConfigError: They cannot be described.
        """
        regions, place = _Regions(), Place.of(config, rank)
        groups: list[Group] = []
        by_rank: list[str] = []
        ratios: list[int] = []
        shapes: dict[tuple[Any, ...], list[tuple[str, int]]] = defaultdict(list)
        for g, (group, pages_of) in enumerate(zip(kv.kv_cache_groups, group_pages(kv, place.ranks), strict=True)):
            known = pages_of.group
            if known.kind == "local":  # its place in the tables stays, its pages are nobody else's
                groups.append(Group(known.block_tokens))
                ratios.append(1)
                continue
            per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            present = [name for name in group.layer_names if name in tensors]
            ratio = {tensors[name].shape[0] // kv.num_blocks for name in present} or {1}
            if len(ratio) > 1:
                raise ConfigError(f"layers of KV-cache group {g} split their blocks differently: {sorted(ratio)}")
            ratios.append(ratio.pop())
            kernel_tokens, turns = known.block_tokens // ratios[-1], place.turns(pages_of.specs[0])
            if turns is not None and kernel_tokens % (turns.count * turns.span):
                raise ConfigError(
                    f"KV-cache group {g}: the kernels' blocks of {kernel_tokens // turns.count} tokens do not hold whole turns of "
                    f"{turns.span} tokens; set --cp-kv-cache-interleave-size to a number that divides these"
                )
            groups.append(Group(kernel_tokens, known.kind, known.window))
            seen: set[int] = set()
            for name in present:
                spec = group.kv_cache_spec if per_layer is None else per_layer.get(name)
                offset = regions.offset(tensors[name])
                if spec is None or offset in seen:
                    continue  # it reads the cache of another layer and has none of its own
                seen.add(offset)
                pages = _Pages(name, tensors[name], spec, g, kernel_tokens, config, place)
                for piece in pages.pieces():
                    shapes[pages.view_of(piece)].append((name, offset + piece.offset))
                if pages.by_rank:
                    by_rank.append(name)
        if by_rank:
            log.warning(
                "it is not known how many KV heads these layers have in all; they can be exchanged with engines of the same "
                "tensor parallel size only: %s",
                ", ".join(by_rank),
            )
        views = tuple(
            View(plane, g, tuple(n for n, _ in at), tuple(o for _, o in at), *rest)
            for (plane, g, *rest), at in shapes.items()
        )
        return cls(Cache(regions.found, tuple(groups), views, rank), tuple(ratios))

    def table(self, logical: BlockTable) -> BlockTable:
        """Return the block table of the kernels' blocks.

        Logical block b is kernel block b * ratio and the ratio - 1 that follow.
        """
        if set(self.ratios) <= {1}:
            return logical
        return BlockTable.of(_expand(row, ratio) for row, ratio in zip(logical, self.ratios, strict=True))


def _expand(ids: Ints, ratio: int) -> Ints:
    wide = ids[:, None] * ratio + np.arange(ratio, dtype=np.int64)
    wide[ids < 0] = NULL
    return wide.ravel()


class _Regions:
    """Storages found so far; vLLM backs all layers with one."""

    def __init__(self) -> None:
        self.found: tuple[Region, ...] = ()

    def offset(self, tensor: torch.Tensor) -> int:
        """Flat offset of the tensor's first element."""
        import torch

        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        region = Region.of(whole)
        if region not in self.found:
            self.found += (region,)
        start = Cache(self.found, (), ()).starts[self.found.index(region)]
        return start + int(tensor.data_ptr()) - region.address


class _Pages:
    """One layer's pages as planes of views.

    ``by_rank``: whether each rank's go to the same rank of an equal engine only, though more than that is known of
    what they hold.
    """

    def __init__(
        self, name: str, t: torch.Tensor, spec: Any, group: int, tokens: int, config: VllmConfig, place: Place
    ) -> None:
        if t.dim() != 4 or t.stride(3) != 1:
            raise ConfigError(
                f"layer {name!r}: a cache of shape {tuple(t.shape)} and strides {t.stride()} is not known"
            )
        self._name, self._t, self._spec, self._group = name, t, spec, group
        self._config, self._rank, self._size = config, place.tensor, place.size
        self._turns = place.turns(spec)
        self._tokens = tokens if self._turns is None else tokens // self._turns.count
        self._layer = layer_of(config, name)
        self._writer = writer_of(self._layer)
        self._k = getattr(spec, "head_size", 0)
        self._v = getattr(spec, "head_size_v", self._k)
        self.by_rank = False
        self._stride, self._head, self._token = (s * t.element_size() for s in t.stride()[:3])

    def pieces(self) -> list[Piece]:
        """Return all that its pages hold."""
        return self._state() if hasattr(self._spec, "shapes") else self._planes()

    def view_of(self, piece: Piece) -> tuple[Any, ...]:
        """Return everything of a plane's view that layers may share."""
        draft = draft_of(self._name, self._config)
        encoding = f"{piece.encoding}/draft {draft}" if draft else piece.encoding
        of_all = piece.plane, self._group, self._t.shape[0], self._stride, piece.unit
        return *of_all, encoding, piece.heads, piece.token, bool(draft), self._turns

    def _plane(
        self, plane: str, unit: int, form: Form, heads: Heads | None, token: int | None, within: int = 0
    ) -> Piece:
        encoding = encoding_of(self._name, self._layer, self._spec, form, self._writer, self._t, self._config)
        return Piece(plane, unit, encoding, heads, within, token)

    def _planes(self) -> list[Piece]:
        """Rows of tokens, as far as it is known that they are."""
        form, spec = form_of(self._spec, self._writer), self._spec
        _, slots, states, content = self._t.shape
        if form == "indexer":
            return self._indexer() or self._whole()
        if form == "whole" or (form == "kv" and self._k + self._v != content):
            return self._whole()
        if states != self._tokens or slots != spec.num_kv_heads:
            raise ConfigError(
                f"layer {self._name!r}: a cache of shape {tuple(self._t.shape)} is not known for {spec.num_kv_heads} heads "
                f"and {self._tokens} tokens a block"
            )
        item = self._t.element_size()
        cell = content * item
        if form == "latent":
            return [self._plane("latent", cell, form, None, self._token)]
        if form == "packed":
            if self._head != states * cell:
                raise ConfigError(f"layer {self._name!r}: the pages of CPU attention are not contiguous by head")
            return [self._plane("kv", self._head, form, self._heads(), None)]
        k, v = self._k * item, self._v * item
        if form == "row":
            return [self._plane("kv", cell, "row", self._heads(), self._token)]
        heads = self._heads()
        return [self._plane("k", k, form, heads, self._token), self._plane("v", v, form, heads, self._token, k)]

    def _indexer(self) -> list[Piece]:
        """Return the values and the scales of a sparse indexer's tokens, each as rows; nothing if its pages are not known."""
        rows = indexer_rows(self._layer, self._spec)
        _, slots, states, content = self._t.shape
        kernel = self._layer.shape or (states, content)
        if (
            rows is None
            or (slots, states, content) != (1, self._tokens, sum(rows))
            or tuple(kernel[-2:]) != (states, content)
        ):
            return []
        if self._token != content:  # the page of one layer is not in one piece
            return []
        values, scales = rows
        return [
            self._plane("index values", values, "indexer", None, values),
            self._plane("index scales", scales, "indexer", None, scales, states * values),
        ]

    def _whole(self) -> list[Piece]:
        """Pages of which nothing is known.

        They are moved in as few pieces as they have in memory, to the same rank of an engine of the same size unless
        all ranks hold the same.
        """
        _, slots, states, content = self._t.shape
        cell = content * self._t.element_size()
        if self._token == cell and (slots == 1 or self._head == states * cell):
            pieces = [slots * states * cell]
        elif self._head == cell and self._token == slots * cell:
            pieces = [slots * states * cell]
        elif self._token == cell:
            pieces = [states * cell] * slots  # other blocks lie between the heads of a page
        else:
            raise ConfigError(
                f"layer {self._name!r}: nothing is known of what is in its pages, and with strides {self._t.stride()} they "
                "are not in one piece; choose another --kv-cache-layout"
            )
        heads = None if replicated(self._spec, self._writer) else Heads(self._rank.tp, 1, self._size, None)
        names = ["page"] if len(pieces) == 1 else [f"page {i}" for i in range(slots)]
        return [
            self._plane(name, unit, "whole", heads, None, i * self._head)
            for i, (name, unit) in enumerate(zip(names, pieces, strict=True))
        ]

    def _state(self) -> list[Piece]:
        """Recurrent states."""
        t, nbytes = self._t, int(self._spec.state_content_size_bytes)
        if t.shape[1:3] != (1, 1) or t.shape[3] * t.element_size() < nbytes:
            raise ConfigError(
                f"layer {self._name!r}: a state cache of shape {tuple(t.shape)} for {nbytes} bytes is not known"
            )
        return state_pieces(self._layer, self._spec, self._rank, self._size, t.device.type)

    def _heads(self) -> Heads:
        """Return the range of the layer's KV heads that this rank holds; ranks beyond their number hold replicas.

        Where their total is not known, a rank's heads go to the same rank of an engine of the same size.
        """
        own, total = self._spec.num_kv_heads, total_heads(self._name, self._layer, self._spec, self._config)
        if total is None:
            self.by_rank = True
            return Heads(self._rank.tp * own, own, self._size * own, None)
        start = self._rank.tp * own if self._size <= total else self._rank.tp * total // self._size
        return Heads(start, own, total, self._head)
