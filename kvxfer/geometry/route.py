"""Who reads what from whom: layers, heads and turns of tokens intersected between two engines of any TP, PP and context parallelism.

Each consumer rank is assigned, for every plane it holds, (layer, head) cells of producer ranks, so that each cell is
read once. Where producers take turns with tokens, a cell is read from one rank of each turn that has a token of the
consumer's. Where producers hold replicas (MLA, or more ranks than KV heads), a consumer prefers ranks that it reads from
already, and among the others the one that serves least so far, so that readers spread. A producer that nobody would
read from still gets one reader with an empty assignment: only a reader's word lets a producer free its blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvxfer.geometry.assignment import Incompatible, ShardAssignment, check_pair, head_range, name
from kvxfer.geometry.cache import Cache
from kvxfer.geometry.turns import ALL, Shared, TokenTurns
from kvxfer.geometry.view import View
from kvxfer.values import Rank

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Route(msgspec.Struct, frozen=True):
    """What one consumer rank reads.

    Attributes:
        assignments: What it reads from each producer rank that it must contact; may be empty for a rank.
        readers: How many consumer ranks read from each of these producer ranks.
    """

    assignments: dict[Rank, tuple[ShardAssignment, ...]]
    readers: dict[Rank, int]


def route(producers: Sequence[Cache], consumers: Sequence[Cache]) -> dict[Rank, Route]:
    """Decide what every consumer rank reads from which producer ranks.

    The result depends only on the arguments, and not on their order, so that all ranks agree without communicating.

    Raises:
        Incompatible: A (layer, plane, head) of a consumer's cache that is not optional has no convertible source, or two caches
            of one side claim to be the same rank.
    """
    sources = sorted(producers, key=lambda c: c.rank)
    sinks = sorted(consumers, key=lambda c: c.rank)
    for side, caches in (("producer", sources), ("consumer", sinks)):
        if len({c.rank for c in caches}) < len(caches):
            raise Incompatible(f"rank: two caches of the {side} say that they are the same rank")
    served: dict[Rank, float] = defaultdict(float)
    places = {c.rank: {(v.plane, layer): i for i, v in enumerate(c.views) for layer in v.layers} for c in sources}
    assignments: dict[Rank, dict[Rank, tuple[ShardAssignment, ...]]] = {}
    for sink in sinks:
        assignments[sink.rank] = _assign(sink, sources, places, served)
    for source in sources if sinks else ():
        if not any(source.rank in of for of in assignments.values()):
            idlest = min(assignments, key=lambda r: (len(assignments[r]), r))
            assignments[idlest][source.rank] = ()
    readers = {s.rank: sum(s.rank in of for of in assignments.values()) for s in sources}
    return {r: Route(assignments=of, readers={p: readers[p] for p in of}) for r, of in assignments.items()}


def _assign(
    sink: Cache, sources: Sequence[Cache], places: dict[Rank, dict[tuple[str, str], int]], served: dict[Rank, float]
) -> dict[Rank, tuple[ShardAssignment, ...]]:
    """Assign one consumer rank what it reads, and add to ``served`` the bytes a token that each source has to serve.

    ``places``: by rank of the source, the index of the view that holds a (plane, layer).
    """
    found: dict[Rank, list[ShardAssignment]] = defaultdict(list)
    for d, view in enumerate(sink.views):
        lo, hi = head_range(view)
        row = {layer: i for i, layer in enumerate(view.layers)}
        open_cells = _wanted(sink, view, sources, places)
        for source in sorted(sources, key=lambda c: (c.rank not in found, served[c.rank], c.rank)):
            at = places[source.rank]
            for s in sorted({at[view.plane, layer] for layer in view.layers if (view.plane, layer) in at}):
                other = source.views[s]
                rows = [row[layer] for layer in other.layers if layer in row]
                a, b = max(lo, head_range(other)[0]), min(hi, head_range(other)[1])
                if not rows or a >= b:
                    continue
                if not _convertible(source, other, sink, view):
                    continue
                free = open_cells[:, :, other.held.index]
                for taken, first, last in _rectangles(rows, free[rows, a - lo : b - lo]):
                    free[np.ix_(taken, range(a - lo + first, a - lo + last))] = False
                    layers = tuple(view.layers[r] for r in taken)
                    found[source.rank].append(ShardAssignment(s, d, layers, a + first, a + last))
                    share = Shared(other.held, view.held).share
                    served[source.rank] += len(taken) * (last - first) * view.unit * share
        if open_cells.any() and not view.optional:
            raise Incompatible(_lacking(sink, view, open_cells, sources))
    return {rank: tuple(of) for rank, of in found.items()}


def _wanted(
    sink: Cache, view: View, sources: Sequence[Cache], places: dict[Rank, dict[tuple[str, str], int]]
) -> NDArray[np.bool_]:
    """Return what of a consumer's view is to be read, [layer, head, whose turn at the producer].

    Raises:
        Incompatible: The ranks of the producer that have a layer do not agree on its turns, or are fewer than these.
    """
    turns: dict[str, TokenTurns] = {}
    for source in sources:
        at = places[source.rank]
        for layer in view.layers:
            if (view.plane, layer) not in at:
                continue
            held = source.views[at[view.plane, layer]].held
            first = turns.setdefault(layer, held)
            if (first.count, first.span) != (held.count, held.span):
                raise Incompatible(
                    f"token: the producer's {name(source)} holds tokens of layer {layer!r}, plane {view.plane!r}, by {held}, "
                    f"another of its ranks by {first}"
                )
    most = max([held.count for held in turns.values()], default=1)
    if most > len(sources):
        raise Incompatible(
            f"token: {most} ranks of the producer take turns with the tokens of plane {view.plane!r}, and it has only {len(sources)}"
        )
    lo, hi = head_range(view)
    cells = np.zeros((len(view.layers), hi - lo, most), dtype=bool)
    shared: dict[TokenTurns, list[int]] = {}
    for i, layer in enumerate(view.layers):
        of = msgspec.structs.replace(turns.get(layer, ALL), index=0)
        if of not in shared:
            each = (msgspec.structs.replace(of, index=turn) for turn in range(of.count))
            shared[of] = [turn.index for turn in each if Shared(turn, view.held).share]
        cells[i, :, shared[of]] = True
    return cells


def _convertible(source: Cache, other: View, sink: Cache, view: View) -> bool:
    """Return whether these views of one plane can be joined.

    Raises:
        Incompatible: They cannot be joined, and the consumer's view is not optional.
    """
    try:
        check_pair(source, other, sink, view)
    except Incompatible:
        if view.optional:
            return False
        raise
    return True


def _rectangles(rows: Sequence[int], free: NDArray[np.bool_]) -> Iterator[tuple[list[int], int, int]]:
    """Cover the free cells, layers x heads, with rectangles (layers, first head, head after the last).

    Layers that are free alike go together, one rectangle for each stretch of heads.
    """
    alike: dict[bytes, list[int]] = defaultdict(list)
    for i in range(len(rows)):
        alike[free[i].tobytes()].append(i)
    for members in alike.values():
        edges = np.flatnonzero(np.diff(np.concatenate(([False], free[members[0]], [False]))))
        for first, last in edges.reshape(-1, 2).tolist():
            yield [rows[i] for i in members], first, last


def _lacking(sink: Cache, view: View, open_cells: NDArray[np.bool_], sources: Sequence[Cache]) -> str:
    """Say which cell has no source, and what the producer has in its place."""
    r, h, turn = (int(x) for x in np.argwhere(open_cells)[0])
    layer = view.layers[r]
    holds = [v for c in sources for v in c.views if layer in v.layers]
    if not holds:
        axis, has = "layer", f"its {len(sources)} ranks hold other layers only"
    elif all(v.plane != view.plane for v in holds):
        axis, has = "plane", f"it has planes {sorted({v.plane for v in holds})} of that layer"
    elif turn or open_cells.shape[2] > 1 and not open_cells[r, h].all():
        axis, has = "token", f"nobody there has the turn {turn} of {open_cells.shape[2]}"
    else:
        axis, has = "head", f"it has heads {sorted({head_range(v) for v in holds if v.plane == view.plane})} of it"
    return (
        f"{axis}: no rank of the producer holds layer {layer!r}, plane {view.plane!r}, head "
        f"{head_range(view)[0] + h}, which the consumer's {name(sink)} needs; {has}"
    )
