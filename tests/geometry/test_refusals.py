"""What cannot be converted is refused, with both sides and the axis named; forged assignments are refused."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.geometry import Cache, Group, Heads, Incompatible, Planner, Rank, Region, ShardAssignment, View, route

structs = msgspec.structs


GROUP, HEADS = Group(16), Heads(0, 4, 4, 512)


def cache(rank: Rank, group: Group = GROUP, heads: Heads | None = HEADS, **view: object) -> Cache:
    """Two layers of packed K|V, head-major, 8 blocks."""
    base: dict[str, object] = {
        "group": 0,
        "layers": ("a", "b"),
        "offsets": (0, 16384),
        "blocks": 8,
        "block_stride": 2048,
        "unit": 16,
        "encoding": "bf16",
        "heads": heads,
        "token_stride": 32,
    }
    views = tuple(
        View(**(base | {"plane": p, "offsets": tuple(o + i * 16 for o in (0, 16384))} | view))  # type: ignore[arg-type]
        for i, p in enumerate(("k", "v"))
    )
    return Cache((Region(1 << 20, 32768),), (group,), views, rank)


P, C = Rank(1, 2), Rank(3, 4)


@pytest.mark.parametrize(
    ("axis", "source", "sink"),
    [
        ("encoding", {"encoding": "bf16"}, {"encoding": "fp8"}),
        ("group kind", {}, {"group": Group(16, "window", 64)}),
        ("window", {"group": Group(16, "window", 32)}, {"group": Group(16, "window", 64)}),
        ("head (present or absent)", {"heads": None}, {}),
        ("head total", {}, {"heads": Heads(0, 4, 8, 512)}),
        ("head (opaque or not)", {"heads": Heads(0, 4, 4, None)}, {}),
        ("head (opaque): range", {"heads": Heads(0, 4, 8, None)}, {"heads": Heads(0, 2, 8, None)}),
        ("token (opaque or not)", {"token_stride": None}, {}),
        ("token (opaque): block tokens", {"token_stride": None}, {"token_stride": None, "group": Group(32)}),
        ("unit bytes", {"unit": 16}, {"unit": 8}),
    ],
)
def test_refusal_names_both_sides_and_the_axis(axis: str, source: dict, sink: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(Incompatible) as e:
        route([cache(P, **source)], [cache(C, **sink)])
    text = str(e.value)
    assert text.startswith(axis + ":")
    assert "producer's rank pp1/tp2" in text and "consumer's rank pp3/tp4" in text


@pytest.mark.parametrize(
    ("axis", "sink"),
    [("layer", {"layers": ("a", "z")}), ("plane", {"plane": "latent"}), ("head", {"heads": Heads(3, 2, 5, 512)})],
)
def test_what_no_rank_holds_is_named(axis: str, sink: dict) -> None:  # type: ignore[type-arg]
    wanted = cache(C, **sink)
    if axis == "plane":
        wanted = structs.replace(wanted, views=wanted.views[:1])
    source = cache(P, heads=Heads(0, 4, 5, 512) if axis == "head" else HEADS)
    with pytest.raises(Incompatible) as e:
        route([source], [wanted])
    assert str(e.value).startswith(f"{axis}: no rank of the producer holds")
    assert "consumer's rank pp3/tp4" in str(e.value)


def test_the_same_rank_twice_is_refused() -> None:
    with pytest.raises(Incompatible, match="two caches of the consumer"):
        route([cache(P)], [cache(C), cache(C)])


GOOD = (ShardAssignment(0, 0, ("a", "b"), 0, 4), ShardAssignment(1, 1, ("a", "b"), 0, 4))


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        (ShardAssignment(2, 0, ("a",), 0, 4), "does not exist"),
        (ShardAssignment(-1, 0, ("a",), 0, 4), "does not exist"),
        (ShardAssignment(0, 2, ("a",), 0, 4), "does not exist"),
        (ShardAssignment(0, 1, ("a",), 0, 4), "plane: an assignment joins 'k' .* with 'v'"),
        (ShardAssignment(0, 0, ("z",), 0, 4), "leaves what the producer's rank pp1/tp2 holds"),
        (ShardAssignment(0, 0, (), 0, 4), "leaves what"),
        (ShardAssignment(0, 0, ("a",), 0, 5), "leaves what"),
        (ShardAssignment(0, 0, ("a",), -1, 4), "leaves what"),
        (ShardAssignment(0, 0, ("a",), 2, 2), "leaves what"),
        (ShardAssignment(0, 0, ("a",), 3, 2), "leaves what"),
        (ShardAssignment(0, 0, ("a", "a"), 0, 4), "assigned twice"),
    ],
)
def test_forged_claims_are_refused(forged: ShardAssignment, words: str) -> None:
    with pytest.raises(Incompatible, match=words):
        Planner(cache(P), cache(C), [forged])


@pytest.mark.parametrize("second", [ShardAssignment(0, 0, ("b",), 1, 2), ShardAssignment(0, 0, ("b", "a"), 3, 4)])
def test_claims_that_overlap_are_refused(second: ShardAssignment) -> None:
    with pytest.raises(Incompatible, match="assigned twice"):
        Planner(cache(P), cache(C), [ShardAssignment(0, 0, ("a", "b"), 0, 4), second])
    Planner(cache(P), cache(C), [ShardAssignment(0, 0, ("a", "b"), 0, 1), ShardAssignment(0, 0, ("b",), 1, 2)])


def test_a_claim_beyond_what_the_consumer_holds_is_refused() -> None:
    sink = cache(C, heads=Heads(1, 2, 4, 512))
    Planner(cache(P), sink, [ShardAssignment(0, 0, ("a",), 1, 3)])
    with pytest.raises(Incompatible, match="leaves what the consumer's rank pp3/tp4 holds"):
        Planner(cache(P), sink, [ShardAssignment(0, 0, ("a",), 0, 3)])


def test_a_claim_that_cuts_opaque_heads_is_refused() -> None:
    sides = cache(P, heads=Heads(0, 4, 4, None)), cache(C, heads=Heads(0, 4, 4, None))
    Planner(*sides, [ShardAssignment(0, 0, ("a",), 0, 4)])
    with pytest.raises(Incompatible, match=r"head \(opaque\): assignment .* cuts the heads"):
        Planner(*sides, [ShardAssignment(0, 0, ("a",), 0, 2)])
