"""The states of recurrent layers: a few tensors in each layer, each with one item for a request, and which rank has what of an item.

Where SGLang says of what parts the channels of a convolution are (``conv_shard_groups``: queries, keys and values of gated delta
nets), the ranks share out each part by itself, and likewise each other tensor, whose channels are one part. If it says that of no
tensor, there may be several parts all the same, as in Mamba 2; then a rank's share moves whole, between equal numbers of ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.geometry import Heads, View
from kvxfer_sglang.states import PoolBuffer


@dataclass(frozen=True)
class _Tensor:
    """What tensors of several layers have in common."""

    number: int  # which one of its layer it is
    nbytes: int  # its bytes
    item: int  # bytes of an item
    rows: int  # rows of an item, each shared out as the others are
    parts: tuple[int, ...]  # this rank's channels of each part of a row; none where that is not known


def recurrent_views(
    args: Any, component: int, buffers: Sequence[PoolBuffer], group: int, rank: int, ranks: int, device: str
) -> Iterator[View]:
    """Yield the planes of a pool's recurrent states.

    Args:
        args: SGLang's ``KVArgs``.
        component: Which one of its states it is.
        buffers: Its tensors: SGLang lists the first of each layer, then the second, and so on.
        group: The group of the cache that it is.
        rank: Among the ranks that share the attention.
        ranks: How many these are.
        device: Where the pool lies, as kvxfer names devices.
    """
    layers = args.state_layer_ids[component] or range(len(buffers))
    shares = _shares(args, component, len(buffers), ranks)
    seen: Counter[int] = Counter()
    alike: defaultdict[_Tensor, list[tuple[int, PoolBuffer]]] = defaultdict(list)
    for layer, buffer, (rows, parts) in zip(layers, buffers, shares, strict=True):
        if buffer.nbytes:
            alike[_Tensor(seen[layer], buffer.nbytes, buffer.item, rows, parts)].append((layer, buffer))
        seen[layer] += 1
    for tensor, of in alike.items():
        for plane, first, unit, heads in _planes(tensor, rank, ranks):
            yield View(
                plane=plane,
                group=group,
                layers=tuple(str(layer) for layer, _ in of),
                offsets=tuple(buffer.start + first for _, buffer in of),
                blocks=tensor.nbytes // tensor.item,
                block_stride=tensor.item,
                unit=unit,
                encoding=device.partition(":")[0],
                heads=heads,
            )


def _shares(args: Any, component: int, count: int, ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return of each tensor its rows, and this rank's channels of each part of a row."""
    whole: list[tuple[int, tuple[int, ...]]] = [(1, ())] * count
    told = args.state_dim_per_tensor[component], args.state_slice_outer_counts[component]
    groups = args.state_conv_shard_groups[component]
    if not any(groups) or not all(len(each) == count for each in told):
        return whole
    shares = []
    for channels, rows, of in zip(*told, groups, strict=True):
        if of and (sum(of) != channels * ranks or any(part % ranks for part in of)):
            return whole
        shares.append((rows, tuple(part // ranks for part in of) if of else (channels,)))
    return shares


def _planes(tensor: _Tensor, rank: int, ranks: int) -> Iterator[tuple[str, int, int, Heads | None]]:
    """Yield the name of each plane, where it begins in an item, the bytes that stay together, and this rank's share."""
    name = f"state.{tensor.number}"
    if not tensor.parts:
        yield name, 0, tensor.item, Heads(rank, 1, ranks, stride=tensor.item)
    elif tensor.parts == (0,):  # SGLang's word for an item that all ranks have
        yield name, 0, tensor.item, None
    else:
        unit = tensor.item // (tensor.rows * sum(tensor.parts))
        first = 0
        for row in range(tensor.rows):
            for number, part in enumerate(tensor.parts):
                if part:
                    yield f"{name}.{row}.{number}", first, unit, Heads(rank * part, part, ranks * part, stride=unit)
                first += part * unit
