"""A chain names a prefix by content: two agree up to the last link before the first difference, and not behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ArgumentError
from kvxfer.schedule import Chain, KnownPrefix, Prefix, PrefixIndex
from kvxfer.schedule.chain import DIGEST, MAX_LINKS, STEP
from kvxfer.schedule.prefix_index import EAGER

TOKEN = st.integers(0, 3)
ROW = st.lists(TOKEN, max_size=6 * STEP)


def common(a: Chain, b: Chain) -> int:
    """How many of the first tokens two chains of one step have in common, looked at link by link."""
    found = 0
    while (one := a.digest(found + a.step)) and one == b.digest(found + a.step):
        found += a.step
    return found


def alike(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(start=ROW, a=ROW, b=ROW)
@settings(max_examples=300)
def test_two_prompts_have_in_common_what_their_chains_do(start: list[int], a: list[int], b: list[int]) -> None:
    one, other = start + a, start + b
    found = common(Prefix(one, model="m").chain(), Prefix(other, model="m").chain())
    assert found == alike(one, other) // STEP * STEP


@given(row=st.lists(TOKEN, min_size=STEP, max_size=3 * STEP))
@pytest.mark.parametrize(
    "other", [{"model": "n"}, {"salt": "s"}, {"salt": ""}, {"lora": "a"}, {"embeds": b"e"}], ids=str
)
def test_what_all_kv_depends_on_is_at_the_root(other: dict[str, Any], row: list[int]) -> None:
    plain = Prefix(row, model="m").chain()
    assert not common(plain, Prefix(row, **{"model": "m"} | other).chain())
    again = Prefix(row, **{"model": "m"} | other).chain()
    assert again == Prefix(np.asarray(row, np.uint16), **{"model": "m"} | other).chain()


@given(row=st.lists(TOKEN, min_size=4 * STEP, max_size=4 * STEP), first=st.integers(0, 4 * STEP - 1))
def test_media_count_from_where_they_begin(row: list[int], first: int) -> None:
    text = Prefix(row, model="m").chain()
    image = Prefix(row, model="m", media=[("a", first, 3)]).chain()
    until = first // STEP * STEP
    assert common(text, image) == until
    assert common(image, Prefix(row, model="m", media=[("b", first, 3)]).chain()) == until
    assert common(image, Prefix(row, model="m", media=[("a", first, 4)]).chain()) == until
    moved = Prefix(row, model="m", media=[("a", max(first - 1, 0), 3)]).chain()
    assert common(image, moved) == (4 * STEP if first == 0 else (first - 1) // STEP * STEP)
    assert image == Prefix(row, model="m", media=[("a", first, 3)]).chain()


def test_tokens_never_look_like_media() -> None:
    """What is hashed says how many items begin in a step, before the tokens."""
    row = [1] * STEP
    chains = {
        Prefix(tokens, model="m", media=media).chain()
        for tokens in (row, [*row[:-1], 0])
        for media in ((), [("a", 0, 1)])
    }
    assert len(chains) == 4


@given(length=st.integers(0, 5 * STEP), asked=st.integers(0, 6 * STEP))
def test_a_chain_covers_whole_steps_of_what_is_asked_for(length: int, asked: int) -> None:
    prefix = Prefix(range(length), model="m")
    chain = prefix.chain(asked)
    assert chain.tokens == min(length, asked) // STEP * STEP
    assert chain.floor(asked + 1) == min(chain.tokens, (asked + 1) // STEP * STEP)
    assert all(chain.digest(n) == (prefix.digest(n) if n % STEP == 0 else b"") for n in range(1, chain.tokens + 1))
    assert (
        not chain.digest(0)
        and not chain.digest(chain.tokens + STEP)
        and not prefix.digest(length // STEP * STEP + STEP)
    )
    assert prefix.chain(asked).until(STEP) == prefix.chain(min(STEP, asked))


@pytest.mark.parametrize(
    ("steps", "every"), [(MAX_LINKS, 1), (MAX_LINKS + 1, 2), (4 * MAX_LINKS, 4), (4 * MAX_LINKS + 4, 8)]
)
def test_a_long_prompt_has_fewer_links(steps: int, every: int) -> None:
    prefix = Prefix(np.arange(steps * STEP + 5), model="m")
    chain = prefix.chain()
    assert len(chain) <= MAX_LINKS and chain.step == every * STEP
    assert chain.tokens == steps // every * every * STEP
    assert all(chain.digest(n) == prefix.digest(n) for n in (chain.step, 3 * chain.step, chain.tokens))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Chain(0, b""),
        lambda: Chain(STEP + 1, b""),
        lambda: Chain(3 * STEP, b""),
        lambda: Chain(STEP, b"x"),
        lambda: Chain(STEP, bytes(DIGEST * (MAX_LINKS + 1))),
        lambda: Chain(STEP, "text"),  # type: ignore[arg-type]
        lambda: Prefix(5, model="m"),  # type: ignore[arg-type]
        lambda: Prefix([1] * STEP, model="m", media=["x"]),  # type: ignore[list-item]
        lambda: Prefix([1.5] * STEP, model="m").chain(),  # type: ignore[list-item]
        lambda: Prefix([1.5] * STEP, model="m"),  # type: ignore[list-item]
        lambda: Prefix([[1] * STEP], model="m"),  # type: ignore[list-item]
        lambda: Prefix([1] * STEP, model="m", media=[("a", -1, 3)]),
        lambda: Prefix([1] * STEP, model="m", media=[("a", 1, -3)]),
        lambda: Prefix([1] * STEP, model=3),  # type: ignore[arg-type]
        lambda: PrefixIndex(-1),
        lambda: PrefixIndex(8).add([1], "x"),  # type: ignore[arg-type]
    ],
)
def test_what_they_cannot_be(wrong: Any) -> None:
    with pytest.raises(ArgumentError):
        wrong()


# --- the index ---------------------------------------------------------------------------------------------------------


@given(rows=st.lists(ROW, min_size=1, max_size=8), wanted=ROW, looks=st.sets(st.integers(0, 7)))
@settings(max_examples=300)
def test_the_index_finds_the_longest_common_part(rows: list[list[int]], wanted: list[int], looks: set[int]) -> None:
    index: PrefixIndex[int] = PrefixIndex(1 << 20)
    chain = Prefix(wanted, model="m").chain()
    for i, row in enumerate(rows):
        index.add(Prefix(row, model="m"), i)
        if i in looks:
            index.find(chain)
    most = max(alike(row, wanted) // STEP * STEP for row in rows)
    found = index.find(chain)
    if not most:
        assert found is None
    else:
        assert found is not None and found.tokens == most
        latest = max(i for i, row in enumerate(rows) if alike(row, wanted) // STEP * STEP == most)
        assert found == KnownPrefix(latest, most)


@given(rows=st.lists(ROW, min_size=1, max_size=12), most=st.integers(0, 8 * STEP))
def test_the_index_is_bounded_and_forgets_the_oldest(rows: list[list[int]], most: int) -> None:
    index: PrefixIndex[int] = PrefixIndex(most)
    for i, row in enumerate(rows):
        index.add(Prefix(row, model="m"), i)
        index.find(Prefix([9] * STEP, model="m").chain())
        assert len(index) <= most
        assert sum(len(links) for links, _ in index._names.values()) <= 4 * (most // STEP)
    last = rows[-1]
    kept = min(len(last) // STEP, most // STEP) * STEP
    found = index.find(Prefix(last, model="m").chain())
    assert (found and found.tokens) == (kept or None)


@given(
    rows=st.lists(st.lists(TOKEN, min_size=STEP, max_size=6 * STEP), min_size=1, max_size=4),
    links=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=8),
    every=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=300)
def test_whoever_knows_some_links_is_given_no_more_than_stands_in_front_of_them(
    rows: list[list[int]], links: list[tuple[int, int]], every: int
) -> None:
    """Chains are put together of known links: repeated, shuffled, cut, of several prompts, and with longer steps."""
    index: PrefixIndex[int] = PrefixIndex(1 << 20)
    prefixes = [Prefix(row, model="m") for row in rows]
    for i, prefix in enumerate(prefixes):
        index.add(prefix, i)
    known = [prefixes[i % len(rows)].links for i, _ in links]
    forged = Chain(STEP * every, b"".join(own[at % len(own)] for own, (_, at) in zip(known, links, strict=True)))
    found = index.find(forged)
    honest = max(common(prefix.chain(), forged) if every == 1 else _sparse(prefix, forged) for prefix in prefixes)
    assert (0 if found is None else found.tokens) <= honest
    if found is not None:
        assert _sparse(prefixes[found.name], forged) >= found.tokens


def _sparse(prefix: Prefix, chain: Chain) -> int:
    """How many of the first tokens a prefix and a chain of any step have in common, looked at link by link."""
    found = 0
    while (one := chain.digest(found + chain.step)) and one == prefix.digest(found + chain.step):
        found += chain.step
    return found


def test_a_chain_with_fewer_links_is_found_by_them() -> None:
    index: PrefixIndex[str] = PrefixIndex(1 << 24)
    tokens = np.arange((MAX_LINKS + 1) * STEP)
    index.add(Prefix(tokens[: 5 * STEP], model="m"), "short")
    assert index.find(Prefix(tokens, model="m").chain()) == KnownPrefix("short", 4 * STEP)


def test_nothing_is_hashed_before_somebody_asks() -> None:
    index: PrefixIndex[str] = PrefixIndex(8 * STEP)
    prefixes = [Prefix([i] * 4 * STEP, model="m") for i in range(5)]
    for prefix in prefixes:
        index.add(prefix, "x")
    assert all(prefix._ids is not None for prefix in prefixes)
    assert len(index) == 8 * STEP, "the first three are dropped unhashed"
    assert index.find(prefixes[0].chain()) is None and index.find(prefixes[4].chain()) is not None
    index.clear()
    assert index.find(prefixes[4].chain()) is None and len(index) == 0


def test_after_a_question_nobody_waits_for_what_is_hashed() -> None:
    index: PrefixIndex[str] = PrefixIndex(64 * STEP)
    index.find(Prefix([0] * STEP, model="m").chain())
    soon, late = (Prefix([i] * 4 * STEP, model="m") for i in (1, 2))
    index.add(soon, "x")
    assert soon._ids is None
    for _ in range(EAGER - 1):
        index.add(soon, "x")
    index.add(late, "x")
    assert late._ids is not None, "nobody has asked for a while"
