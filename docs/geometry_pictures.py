"""Draw ``docs/images/geometry-*.svg`` from real plans, and the tables of ``docs/geometry.md`` from real refusals.

Run ``python docs/geometry_pictures.py``. A test fails when they are not what the code says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from kvxfer.geometry import Cache, Group, Heads, Incompatible, Planner, Rank, Region, ShardAssignment, View, route

HERE = Path(__file__).parent
PAGE, IMAGES = HERE / "geometry.md", HERE / "images"

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#997700")
INK, FAINT = "#333333", "#999999"
FIRST = Rank()


class Svg:
    """Shapes on a white sheet."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="DejaVu Sans, Verdana, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        stroke: str = "#ffffff",
        *,
        thick: float = 1,
        faint: bool = False,
    ) -> None:
        opacity = ' fill-opacity="0.3"' if faint else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}"{opacity} stroke="{stroke}" '
            f'stroke-width="{thick:g}"/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 11, fill: str = INK, anchor: str = "start") -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def ribbon(self, top: tuple[float, float], bottom: tuple[float, float], y0: float, y1: float, fill: str) -> None:
        """Draw a band from an interval above to an interval below."""
        (a, b), (c, d), m = top, bottom, (y0 + y1) / 2
        self._parts.append(
            f'<path d="M{a:g},{y0:g} C{a:g},{m:g} {c:g},{m:g} {c:g},{y1:g} L{d:g},{y1:g} C{d:g},{m:g} {b:g},{m:g} {b:g},{y0:g} Z" '
            f'fill="{fill}" fill-opacity="0.35" stroke="{fill}" stroke-width="0.5"/>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, stroke: str = FAINT, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<path d="M{x0:g},{y0:g} L{x1:g},{y1:g}" stroke="{stroke}"{dashes} fill="none"/>')

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


@dataclass(frozen=True)
class Content:
    """A kind of content.

    Planes that are no axis lie side by side; heads and tokens that are none are opaque.

    Attributes:
        planes: Their names.
        headed: Whether it has heads.
        layouts: Axes by the layout's name, the outermost first: L layer, B block, P plane, H head, N token.
        kind: Of the block table's group.
    """

    planes: tuple[str, ...]
    headed: bool
    layouts: dict[str, str]
    kind: Literal["full", "state"] = "full"


KV = Content(
    ("k", "v"),
    True,
    {
        "FlashAttention `[2, B, N, H, D]`": "LPBNH",
        "FlashInfer `[B, 2, N, H, D]`": "LBPNH",
        "packed NHD `[B, N, H, 2D]`": "LBNH",
        "packed HND `[B, H, N, 2D]`": "LBHN",
        "head-outermost LHBNC": "LHBN",
        "block-outermost BLNHC": "BLNH",
        "BLHNC": "BLHN",
        "BHLNC": "BHLN",
    },
)
CONTENTS = {
    "K and V of each head": KV,
    "MLA latent": Content(("latent",), False, {"`[B, N, C]`": "LBN", "block-outermost BLNC": "BLN"}),
    "CPU attention, `[B, H, opaque]`": Content(("kv",), True, {"`[B, H, opaque]`": "LBH", "block-outermost": "BLH"}),
    "heads packed together, `[B, N, opaque]`": Content(
        ("kv",), True, {"`[B, N, opaque]`": "LBN", "block-outermost": "BLN"}
    ),
    "state, `[B, opaque]`": Content(("state",), True, {"`[B, opaque]`": "LB", "block-outermost": "BL"}, "state"),
}


def cache(
    order: str,
    n: int,
    heads: tuple[int, int] = (0, 8),
    content: Content = KV,
    *,
    total: int = 8,
    layers: tuple[int, int] = (0, 1),
    blocks: int = 8,
    rank: Rank = FIRST,
) -> Cache:
    """Return the cache of a rank that holds these heads and layers, with a byte for each plane, head and token."""
    count, deep = heads[1] - heads[0], layers[1] - layers[0]
    size = {"L": deep, "B": blocks, "P": len(content.planes), "N": n, "H": count}
    unit = (1 if "H" in order or not content.headed else count) * (1 if "N" in order or content.kind == "state" else n)
    stride, step = {"P": unit}, unit * (1 if "P" in order else len(content.planes))
    for axis in reversed(order):
        stride[axis] = step
        step *= size[axis]
    names = tuple(f"layer {i}" for i in range(*layers))
    held = Heads(heads[0], count, total, stride.get("H")) if content.headed else None
    views = tuple(
        View(
            plane,
            0,
            names,
            tuple(i * stride["L"] + k * stride["P"] for i in range(deep)),
            blocks,
            stride["B"],
            unit,
            "bf16",
            held,
            stride.get("N"),
        )
        for k, plane in enumerate(content.planes)
    )
    return Cache((Region(0, step),), (Group(n, content.kind),), views, rank)


def engine(
    content: Content, order: str, n: int, tp: int, stages: tuple[tuple[int, int], ...] = ((0, 8),)
) -> list[Cache]:
    """Return all ranks of an engine; content without heads is on every rank."""
    return [
        cache(order, n, (r * 8 // tp, (r + 1) * 8 // tp), content, layers=layers, rank=Rank(pp, r))
        for pp, layers in enumerate(stages)
        for r in range(tp)
    ]


def joined(src: Cache, dst: Cache) -> Planner:
    """Return a planner of everything that the two caches have in common."""
    assignments = []
    for i, (s, d) in enumerate(zip(src.views, dst.views, strict=True)):
        assert s.heads is not None and d.heads is not None
        lo, hi = max(s.heads.start, d.heads.start), min(s.heads.start + s.heads.count, d.heads.start + d.heads.count)
        assignments.append(ShardAssignment(i, i, tuple(name for name in d.layers if name in s.layers), lo, hi))
    return Planner(src, dst, assignments)


# --- one block: what is contiguous on both sides is one row -----------------------------------------------------------


def block_picture() -> Svg:
    """Draw memory of one block on both sides, and the rows of the pattern between them."""
    both, one = (0, 2), (1, 2)
    cases = [
        ("equal pages, [N, H, C]: one row", cache("LBNH", 4, both, total=2), cache("LBNH", 4, both, total=2)),
        (
            "token-major into head-major: a row a token and head",
            cache("LBNH", 4, both, total=2),
            cache("LBHN", 4, both, total=2),
        ),
        (
            "head-major, the consumer holds head 1 only: one row",
            cache("LBHN", 4, both, total=2),
            cache("LBHN", 4, one, total=2),
        ),
        (
            "token-major, the consumer holds head 1 only: a row a token",
            cache("LBNH", 4, both, total=2),
            cache("LBNH", 4, one, total=2),
        ),
    ]
    svg, cell = Svg(760, 30 + 150 * len(cases)), 40
    for i, (title, src, dst) in enumerate(cases):
        y = 30 + 150 * i
        plan = joined(src, dst).plan([[0]], [[0]], 0, 4)
        svg.text(20, y, f"{title}  ({plan.nbytes // plan.rows} of {plan.nbytes} B each)", 13)
        for c, top, side in ((src, y + 12, "producer"), (dst, y + 88, "consumer")):
            svg.text(20, top + 20, side, 11, FAINT)
            for x, head, token, plane in cells(c):
                svg.box(90 + cell * x, top, cell, 30, COLOURS[head])
                svg.text(90 + cell * (x + 0.5), top + 13, f"t{token}", 10, "#ffffff", "middle")
                svg.text(90 + cell * (x + 0.5), top + 25, f"h{head} {plane}", 9, "#ffffff", "middle")
        for strided in plan.copies:
            for a, b in zip(strided.src_at[0] + strided.src_rows, strided.dst_at[0] + strided.dst_rows, strict=True):
                n = int(strided.row_bytes[0])
                svg.ribbon(
                    (90 + cell * a + 1, 90 + cell * (a + n) - 1),
                    (90 + cell * b + 1, 90 + cell * (b + n) - 1),
                    y + 43,
                    y + 87,
                    INK,
                )
    return svg


def cells(c: Cache) -> Iterator[tuple[int, int, int, str]]:
    """Yield (offset, head, token, plane) of every unit of block 0 of the first layer, a byte each."""
    for v in c.views:
        assert v.heads is not None and v.heads.stride is not None and v.token_stride is not None
        for h in range(v.heads.count):
            for t in range(c.groups[0].block_tokens):
                yield v.offsets[0] + h * v.heads.stride + t * v.token_stride, v.heads.start + h, t, v.plane


# --- block tables: segments are what two blocks have in common --------------------------------------------------------


def segment_picture() -> Svg:
    """Draw the tokens of a request, cut at the borders of both tables."""
    src, dst = (cache("LBNH", n, (0, 1), total=1, blocks=16) for n in (4, 6))
    tables, start, tokens = ([7, 2, 9, 4, 12, 5], [3, 11, -1, 8]), 3, 23
    (part,) = joined(src, dst).plan([tables[0]], [tables[1]], start, tokens).logical
    svg, left, step = Svg(880, 250), 130, 31
    rows = (("producer's table", 4, tables[0], 30), ("consumer's table", 6, tables[1], 150))
    for words, n, table, y in rows:
        svg.text(10, y + 24, words, 12)
        for p, block in enumerate(table):
            x, used = left + step * n * p, min(n, 24 - n * p)
            svg.box(x, y, step * used, 40, COLOURS[6] if block < 0 else COLOURS[0], faint=True, stroke=INK)
            svg.text(x + step * used / 2, y + 25, "null" if block < 0 else f"block {block}", 12, INK, "middle")
    for t in range(25):
        svg.text(left + step * t, 222, str(t), 9, FAINT, "middle")
    svg.text(10, 115, "segments", 12)
    for i, (token, count) in enumerate(zip(part.token.tolist(), part.count.tolist(), strict=True)):
        x, w = left + step * token, step * count
        colour = COLOURS[(1, 2, 5)[i % 3]]
        svg.ribbon((x + 1, x + w - 1), (x + 1, x + w - 1), 70, 100, colour)
        svg.box(x + 1, 100, w - 2, 20, colour)
        svg.text(x + w / 2, 114, f"{count}", 11, "#ffffff", "middle")
        svg.ribbon((x + 1, x + w - 1), (x + 1, x + w - 1), 120, 150, colour)
    for t, words in ((start, f"start = {start}"), (tokens, f"tokens = {tokens}")):
        svg.line(left + step * t, 20, left + step * t, 210, INK, "4 3")
        svg.text(left + step * t, 15, words, 11, INK, "middle")
    words = "A prefix that the consumer has already is skipped to the token; where its table is null nothing is wanted."
    svg.text(left, 242, words, 11, FAINT)
    return svg


# --- ranks: who reads which layers and heads from whom ----------------------------------------------------------------


def shard_picture() -> Svg:
    """Draw layers by heads, of a producer of TP 2 and two stages and a consumer of TP 4."""
    producers, consumers = engine(KV, "LBHN", 4, 2, ((0, 5), (5, 8))), engine(KV, "LBHN", 4, 4)
    routes, colour = route(producers, consumers), {c.rank: COLOURS[i] for i, c in enumerate(producers)}
    svg, cell, top = Svg(760, 340), 30, 60
    for x, words, caches in ((70, "producer: TP 2, PP 2", producers), (430, "consumer: TP 4", consumers)):
        svg.text(x, 24, words, 14)
        svg.text(x + 120, 46, "KV heads 0 to 7", 11, FAINT, "middle")
        svg.text(x - 8, top + 20, "layer 0", 11, FAINT, "end")
        svg.text(x - 8, top + 20 + 7 * cell, "layer 7", 11, FAINT, "end")
        for c in caches:
            v = c.views[0]
            assert v.heads is not None
            own = {c.rank: (ShardAssignment(0, 0, v.layers, v.heads.start, v.heads.start + v.heads.count),)}
            for rank, assignments in (own if caches is producers else routes[c.rank].assignments).items():
                _area(svg, x, top, cell, assignments[0], colour[rank])
            outline = own[c.rank][0]
            _area(svg, x, top, cell, outline, "none", f"pp{c.rank.pp} tp{c.rank.tp}")
    links = sum(len(r.assignments) for r in routes.values())
    (readers,) = {n for r in routes.values() for n in r.readers.values()}
    words = f"{links} links; every cell is assigned once; each producer rank waits for {readers} readers before it frees blocks."
    svg.text(70, 325, words, 11, FAINT)
    return svg


def _area(svg: Svg, x: float, y: float, cell: int, c: ShardAssignment, fill: str, words: str = "") -> None:
    left, top = x + cell * c.head_lo, y + cell * int(c.layers[0].split()[1])
    width, height = cell * (c.head_hi - c.head_lo), cell * len(c.layers)
    svg.box(left, top, width, height, fill, INK if words else "#ffffff", thick=2 if words else 0)
    svg.text(left + width / 2, top + height / 2 + 4, words, 11, "#ffffff", "middle")


# --- the packed stream ------------------------------------------------------------------------------------------------


def stream_picture() -> Svg:
    """Draw rows scattered over two layers on the producer, one long message, and rows scattered otherwise on the consumer."""
    src, dst = (cache("LBNH", 2, (lo, 2), total=2, layers=(0, 2), blocks=4) for lo in (0, 1))
    plan = joined(src, dst).plan([[2, 0, 3]], [[1, 3, 0]], 0, 5)
    svg, left, step = Svg(880, 300), 120, 11.5
    for c, y, words in ((src, 40, "producer's cache"), (dst, 230, "consumer's cache")):
        svg.text(10, y + 18, words, 11)
        view = c.views[0]
        for i, offset in enumerate(view.offsets):
            for b in range(view.blocks):
                x, w = left + step * (offset + b * view.block_stride), step * view.block_stride
                svg.box(x, y, w, 26, "#eeeeee", FAINT)
                svg.text(x + w / 2, y - 5 if y < 100 else y + 40, f"l{i} b{b}", 9, FAINT, "middle")
    svg.text(10, 153, "packed stream", 11)
    places, begin = sorted({int(at) for strided in plan.copies for at in strided.src_at}), 0
    for strided in plan.copies:
        base, pitch = (x.tolist() for x in strided.stream())
        for s, (a, b) in enumerate(zip(strided.src_at.tolist(), strided.dst_at.tolist(), strict=True)):
            fill = COLOURS[places.index(a)]
            for r, (i, j) in enumerate(zip(strided.src_rows.tolist(), strided.dst_rows.tolist(), strict=True)):
                offsets = a + i, begin + base[s] + r * pitch[s], b + j
                spans = [(left + step * o + 0.5, left + step * (o + pitch[s]) - 0.5) for o in offsets]
                for (p, q), y in zip(spans, (40, 135, 230), strict=True):
                    svg.box(p, y, q - p, 26, fill)
                svg.ribbon(spans[0], spans[1], 66, 135, fill)
                svg.ribbon(spans[1], spans[2], 161, 230, fill)
        begin += strided.nbytes
    words = f"A colour a segment: three blocks, the last one partial. {plan.rows} rows become one message of {plan.nbytes} B."
    svg.text(left, 290, words, 11, FAINT)
    return svg


# --- tables -----------------------------------------------------------------------------------------------------------


def verdict(producers: list[Cache], consumers: list[Cache]) -> str:
    """Return nothing if the caches convert, else the axis that the refusal names."""
    try:
        for rank, r in route(producers, consumers).items():
            sink = next(c for c in consumers if c.rank == rank)
            for c in producers:
                Planner(c, sink, r.assignments.get(c.rank, ()))
    except Incompatible as e:
        return str(e).partition(":")[0]
    return ""


def within() -> str:
    """Return the table of what two engines may differ in, for every kind of content."""
    lines = ["| content | layouts | block size | tensor parallelism | pipeline stages |", "|---|---|---|---|---|"]
    for name, content in CONTENTS.items():
        orders = list(content.layouts.values())
        layouts = {verdict(engine(content, a, 16, 1), engine(content, b, 16, 1)) for a in orders for b in orders}
        sizes = {
            verdict(engine(content, orders[0], a, 1), engine(content, orders[0], b, 1))
            for a, b in ((16, 64), (64, 16), (48, 64))
        }
        tps = {
            verdict(engine(content, orders[0], 16, a), engine(content, orders[0], 16, b))
            for a, b in ((1, 4), (4, 1), (2, 8))
        }
        stages = {
            verdict(engine(content, orders[0], 16, 1, a), engine(content, orders[0], 16, 1, b))
            for a, b in ((((0, 8),), ((0, 5), (5, 8))), (((0, 5), (5, 8)), ((0, 3), (3, 8))))
        }
        cells = [_allowed(x) for x in (layouts, sizes, tps, stages)]
        cells[0] = f"{cells[0]}: {', '.join(content.layouts)}"
        if content.kind == "state":
            cells[1] += " (one state a request; states along the way: equal)"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _allowed(refusals: set[str]) -> str:
    (found,) = refusals
    return f"equal; else refused: {found}" if found else "any to any"


def between() -> str:
    """Return the table of what is refused between kinds of content, by the axis that the refusal names."""
    lines = ["| producer, consumer | " + " | ".join(CONTENTS) + " |", "|---" * (len(CONTENTS) + 1) + "|"]
    for name, content in CONTENTS.items():
        row = []
        for other in CONTENTS.values():
            found = verdict(*(engine(x, next(iter(x.layouts.values())), 16, 1) for x in (content, other)))
            row.append(found or "converts")
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


PICTURES = {"block": block_picture, "segments": segment_picture, "shards": shard_picture, "stream": stream_picture}


def drawn(page: str) -> str:
    """Return the page with its tables as the code is now."""
    for name, table in (("within", within), ("between", between)):
        body = f"<!-- {name} -->\n{table()}\n<!-- end {name} -->"
        page, found = re.subn(f"<!-- {name} -->.*?<!-- end {name} -->", lambda _, b=body: b, page, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"{PAGE} has no place for the table {name!r}")
    return page


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (IMAGES / f"geometry-{name}.svg").write_text(str(picture()))
    PAGE.write_text(drawn(PAGE.read_text()))
