"""Small caches in several layouts, and plans between them to be moved by a back end that takes plans."""

from __future__ import annotations

import msgspec
import numpy as np

from kvxfer.geometry import Cache, Group, Heads, Planner, Rank, Region, View, route
from kvxfer.geometry.region import flat_starts
from kvxfer.testing.conformance import World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.conformance.participant_link import Started
from kvxfer.testing.participant import LocalParticipant, Participant
from kvxfer.transport import PlanBatch, Verb

__all__ = ["PAIRS", "move_plans", "planner"]

LAYERS, HEADS, CONTENT = 3, 4, 32


def cache(layout: str, tokens: int, blocks: int, lo: int = 0, hi: int = HEADS, split: bool = False) -> Cache:
    """K and V of three layers. ``layout``: NHD or HND. ``split``: a region for each layer."""
    heads, names = hi - lo, tuple(f"layer.{i}" for i in range(LAYERS))
    page = tokens * heads * CONTENT
    size = 2 * blocks * page + 64
    regions = tuple(Region(1 + i * (1 << 30), size) for i in range(LAYERS)) if split else (Region(1, LAYERS * size),)
    starts = flat_starts(regions) if split else tuple(i * size for i in range(LAYERS))
    token, head = (heads * CONTENT, CONTENT) if layout == "NHD" else (CONTENT, tokens * CONTENT)
    views = tuple(
        View(
            plane,
            0,
            names,
            tuple(at + 16 + v * page for at in starts),
            blocks,
            2 * page,
            CONTENT,
            "test",
            Heads(lo, heads, HEADS, head),
            token,
        )
        for v, plane in enumerate("kv")
    )
    found = Cache(regions, (Group(tokens),), views)
    found.check()
    return found


PAIRS = {
    "same": (cache("NHD", 4, 20), cache("NHD", 4, 24)),
    "layout": (cache("NHD", 4, 20), cache("HND", 4, 24)),
    "block size": (cache("NHD", 4, 20), cache("NHD", 8, 12)),
    "layout and block size": (cache("HND", 8, 10), cache("NHD", 4, 24)),
    "half the heads": (cache("NHD", 4, 20), cache("NHD", 4, 24, 2, 4)),
    "into half the heads": (cache("HND", 4, 20, 0, 2), cache("NHD", 4, 24)),
    "a region a layer": (cache("NHD", 4, 20, split=True), cache("HND", 4, 24, split=True)),
}


def planner(src: Cache, dst: Cache) -> Planner:
    """For what the consumer takes from this producer; heads that it lacks come from another."""
    views = tuple(msgspec.structs.replace(v, heads=Heads(2, 2, HEADS, v.heads.stride)) for v in src.views if v.heads)
    other = msgspec.structs.replace(src, views=views, rank=Rank(tp=1))
    return Planner(src, dst, route([src, other], [dst])[Rank()].assignments[Rank()])


def move_plans(world: World, me: LocalParticipant, other: Participant, pair: str, verb: Verb) -> None:
    """Move requests of several lengths between the caches of two participants, and check every byte of the target."""
    src, dst = PAIRS[pair]
    sender, receiver = (other, me) if verb is Verb.READ else (me, other)
    memory = sender.allocate([r.nbytes for r in src.regions], 1), receiver.allocate([r.nbytes for r in dst.regions], 2)
    local, remote = memory[::-1] if verb is Verb.READ else memory
    link = world.link(sender, receiver)
    planned, random = planner(src, dst), np.random.default_rng(3)
    for start, tokens in ((0, 32), (0, 31), (5, 17), (8, 9), (0, 32)):
        src_blocks = random.permutation(src.views[0].blocks)[: -(-32 // src.groups[0].block_tokens)]
        dst_blocks = random.permutation(dst.views[0].blocks)[: -(-32 // dst.groups[0].block_tokens)]
        plan = planned.plan([src_blocks], [dst_blocks], start, tokens)
        expected, content, runs = receiver.content(memory[1]).copy(), sender.content(memory[0]), plan.runs()
        for a, b, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
            expected[b : b + n] = content[a : a + n]
        batch = PlanBatch(verb, link.peers[me.name], local, plan, remote)
        world.succeed(Started([(me, me.submit(batch))]))
        assert_equal(receiver.content(memory[1]), expected, "the target's memory")
