"""Wrong calls: each is answered by itself, in a sentence with its argument's name, and the transfer beside them goes through."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import (
    Agent,
    ArgumentError,
    BlockTable,
    ClosedError,
    Config,
    Directory,
    Ended,
    Fetch,
    Group,
    KvxferError,
    Offer,
    Rank,
    Source,
    Ticket,
    TransferId,
    readable,
)
from kvxfer.facts import sealed
from kvxfer.geometry import Cache, Heads, Region, View
from kvxfer.identity import digest
from kvxfer.testing.engine import until

TOKENS, BLOCKS, HEADS, UNIT = 4, 16, 4, 16
T, DIGEST = TransferId("own/1/x", 0), b"d"
HERE = Source("127.0.0.1", 7000, 1)
GOOD = Ticket(T, DIGEST, HERE)
TABLE = BlockTable.of([[1, 2]])
FAKE = "kvxfer.testing.fake:FakeTransport"


def offer(**wrong: Any) -> Offer:
    good = {"transfer": T, "digest": DIGEST, "generation": 1, "tokens": 8, "blocks": TABLE, "final": True}
    return Offer(**{**good, **wrong})


def fetch(**wrong: Any) -> Fetch:
    good = {"handle": "r", "transfer": T, "digest": DIGEST, "source": HERE, "blocks": TABLE, "start": 0, "tokens": 8}
    return Fetch(**{**good, **wrong})


def view(**wrong: Any) -> View:
    page = HEADS * TOKENS * UNIT
    good = {
        "plane": "kv",
        "group": 0,
        "layers": ("0",),
        "offsets": (0,),
        "blocks": BLOCKS,
        "block_stride": page,
        "unit": UNIT,
        "encoding": "e",
        "heads": Heads(0, HEADS, HEADS, TOKENS * UNIT),
        "token_stride": UNIT,
    }
    return View(**{**good, **wrong})


def cache(memory: np.ndarray, rank: Rank | None = None, heads: Heads | None = None, **wrong: Any) -> Cache:
    planes = view(**wrong) if heads is None else view(heads=heads, **wrong)
    return Cache((Region(memory.ctypes.data, memory.nbytes),), (Group(TOKENS),), (planes,), rank or Rank())


def tensors(dims: str = "block token unit", **wrong: Any) -> Cache:
    return Cache.of_tensors(np.zeros((2, 4, 5)), dims, **wrong)


def twice(agent: Agent, first: dict[str, Any], then: dict[str, Any]) -> None:
    """Offer a transfer of its own, which ends again."""
    transfer = TransferId(f"own/1/{uuid.uuid4()}", 0)

    def of(given: dict[str, Any]) -> Offer:
        given = {"tokens": 8, **given}
        return offer(transfer=transfer, **given, blocks=BlockTable.of([[1, 2][: given["tokens"] // 4]]))

    agent.offer(of(first))
    try:
        agent.offer(of(then))
    finally:
        agent.revoke(transfer, 2, "", True)


VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "tokens are a float": (lambda: offer(tokens=8.0), "tokens must be an integer, not 8.0"),
    "tokens are a truth value": (lambda: fetch(tokens=True), "tokens must be an integer, not True"),
    "negative tokens": (lambda: offer(tokens=-1), "tokens must be at least 0, not -1"),
    "no tokens, and final": (lambda: offer(tokens=0), "tokens must be positive in a final offer"),
    "no tokens to fetch": (lambda: fetch(tokens=0), "tokens must be at least 1"),
    "start behind the end": (lambda: fetch(start=9), "start must be at most 7, not 9"),
    "generation is negative": (lambda: offer(generation=-1), "generation must be at least 0, not -1"),
    "final is none": (lambda: offer(final=None), "final must be True or False, not None"),
    "digest is a text": (lambda: offer(digest="d"), "digest must be bytes, not 'd'"),
    "digest is long": (lambda: fetch(digest=bytes(65)), "digest must have at most 64 bytes, not 65"),
    "transfer is a text": (lambda: offer(transfer="x"), "transfer must be a kvxfer TransferId, not 'x'"),
    "blocks are a list": (lambda: offer(blocks=[[1, 2]]), "blocks must be a kvxfer BlockTable, not a list"),
    "handle is a number": (lambda: fetch(handle=7), "handle must be a str, not 7"),
    "source is a text": (lambda: fetch(source="host:7000"), "source must be a kvxfer Source"),
    "own is a text": (lambda: fetch(own="host:7000"), "own must be a kvxfer Source"),
    "host is a number": (lambda: Source(127, 7000, 1), "host must be a str"),
    "port is too large": (lambda: Source("h", 70000, 1), "port must be at most 65535"),
    "epoch is negative": (lambda: Source("h", 7000, -1), "epoch must be at least 0"),
    "a name is a number": (lambda: TransferId.mint(1, 5), "base must be a str that is not empty, not 5"),
    "a name is endless": (lambda: TransferId.routed("x" * 20_000), "not a text of up to"),
    "minted from a text": (lambda: TransferId.mint("7", "x"), "epoch must be an integer"),
    "rows are lists": (lambda: BlockTable(([1, 2],)), r"rows\[0\] must be bytes"),
    "a rank is a text": (lambda: Rank("0", 0), "pp must be an integer"),
    "a group of no kind": (lambda: Group(4, "ful"), "kind must be one of full, window"),
    "block_tokens is a float": (lambda: Group(4.0), "block_tokens must be an integer"),
    "an address is a float": (lambda: Region(1.0, 4), "address must be an integer"),
    "a stride is a float": (lambda: view(block_stride=64.0), "block_stride must be an integer, not 64.0"),
    "an offset is a float": (lambda: view(offsets=(0.0,)), r"offsets\[0\] must be an integer"),
    "layers are a text": (lambda: view(layers="layer"), "layers must be a tuple of str"),
    "heads are a number": (lambda: view(heads=4), "heads must be a kvxfer Heads"),
    "a head's stride is a float": (lambda: Heads(0, 4, 4, 64.0), "stride must be an integer"),
    "regions are a region": (lambda: Cache(Region(1, 1), (), ()), "regions must be a tuple of Region"),
    "views are groups": (lambda: Cache((), (), (Group(4),)), r"views\[0\] must be a kvxfer View"),
    "settings are nothing": (lambda: Config.from_mapping(None), "settings must be a mapping"),
    "digest is empty": (lambda: fetch(digest=b""), "digest must not be empty"),
    "a ticket of nothing": (lambda: Ticket(T, b"", HERE), "digest must not be empty"),
    "port is none": (lambda: Source("h", 0, 1), "port must be at least 1, not 0"),
    "host is a sentence": (lambda: Source("not a host!", 7, 1), "host 'not a host!' is neither an IP address nor"),
    "rows are nothing": (lambda: BlockTable.of(None), "rows must be one row of block ids for each group, not None"),
    "an id is above 32 bits": (lambda: BlockTable.of([[1 << 31]]), "group 0: .*above"),
    "bands of what is final": (lambda: offer(bands=1), "bands must be at most 0, not 1"),
    "rows are none": (lambda: BlockTable(None), "rows must be a tuple"),
    "too many rows": (lambda: BlockTable.of([[1]] * 129), "rows must be a tuple of up to 128"),
    "a rank is negative": (lambda: Rank(-1), "pp must be at least 0"),
    "a block of nothing": (lambda: Group(0), "block_tokens must be at least 1"),
    "a window of nothing": (lambda: Group(4, "window"), "window must be at least 1"),
    "a window of all": (lambda: Group(4, "full", 7), "window must be at most 0"),
    "a digest of no model": (lambda: digest(tokens=[1], model=None), "model must be a str"),
    "a digest of a number of media": (lambda: digest(tokens=[1], model="", media=5), "media must be .hash, position"),
    "a digest with a numbered salt": (lambda: digest(tokens=[1], model="", salt=5), "salt must be a str, not 5"),
    "a digest of embeddings": (lambda: digest(tokens=[1], model="", embeds=np.ones(2)), "embeds must be bytes, not"),
    "enough for more than all": (lambda: fetch(enough=9), "enough must be at most 8, not 9"),
    "a trace nowhere": (lambda: Config(trace=""), "'trace' cannot be ''"),
    "no time to start": (lambda: Config(start_timeout=0), "'start_timeout' cannot be 0"),
    "facts of numbers": (lambda: sealed({"a": 1}), "the fact 'a' must be a text"),
    "facts of nothing": (lambda: sealed(None), "facts must be a mapping"),
    "heads beyond the model": (
        lambda: tensors("block head unit", heads=(1, 3), group=Group(1)),
        r"heads\[1\] must be at least 4",
    ),
    "layers by number": (lambda: tensors(layers=3), "layers must be a tuple of str, not 3"),
    "layers twice": (lambda: tensors("layer block unit", layers=["a", "a"]), "layers must be named apart"),
    "a group by number": (lambda: tensors(group=4), "group must be a kvxfer Group"),
    "tensors of objects": (
        lambda: Cache.of_tensors(np.empty((2, 4, 5), object), "block token unit"),
        "must hold numbers, not objects",
    ),
    "a ticket for a text": (lambda: Ticket(T, "d", HERE), "digest must be bytes, not 'd'"),
    "a ticket from a ticket": (lambda: Ticket(T, DIGEST, GOOD), "source must be a kvxfer Source"),
    "a ticket's blocks are lists": (lambda: GOOD.fetch("r", [[1, 2]], 0, 8), "blocks must be a kvxfer BlockTable"),
    "a ticket's tokens are numpy's": (lambda: GOOD.fetch("r", TABLE, 0, np.float32(8)), "tokens must be an integer"),
    "a payload of text": (lambda: offer(payload="x"), "payload must be bytes, not 'x'"),
    "consumers by halves": (lambda: offer(consumers=np.float64(2)), "consumers must be an integer"),
    "an endless handle": (lambda: fetch(handle="x" * 100_000), "handle must have at most 4096 characters"),
    "no block is a text": (lambda: BlockTable.of([[1]], null="x"), "null must be an integer, not 'x'"),
    "a prompt below none": (lambda: TransferId("own/1/x", -1), "prompt must be at least 0, not -1"),
    "tensors of two dtypes": (
        lambda: Cache.of_tensors([np.zeros((2, 4, 5), np.uint8), np.zeros((2, 4, 5), np.int8)], "block token unit"),
        "encoding must be given: the tensors of plane 'kv' are of int8 and of uint8",
    ),
    "one tensor for two layers": (
        lambda: Cache.of_tensors([np.zeros((2, 4, 5))] * 2, "block token unit"),
        "lies in the same bytes",
    ),
    "a rank of two numbers": (lambda: tensors(rank=(0, 0)), "rank must be a kvxfer Rank, not a tuple"),
    "a cache and nothing": (lambda: tensors() + None, "other must be a kvxfer Cache, not None"),
    "an agent over memory of another kind": (
        lambda: Agent(Cache((Region(4096, 4096, "xpu:0"),), (Group(4),), (view(),)), Config(backend=FAKE)),
        "device 'xpu' is not known: kvxfer has spaces for ",
    ),
    "an agent over two devices": (
        lambda: Agent(
            Cache((Region(4096, 4096), Region(1, 9, "cuda:0")), (Group(4),), (view(),)), Config(backend=FAKE)
        ),
        "regions must be of one device, not of cpu and cuda:0",
    ),
    "a directory without its configuration": (lambda: Directory("engine"), "config must be a kvxfer Config"),
}
"""What is wrong, the call, and what it is told."""


@pytest.mark.parametrize("wrong", VALUES)
def test_a_wrong_value_is_refused_by_name(wrong: str) -> None:
    call, told = VALUES[wrong]
    with pytest.raises(KvxferError, match=told) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_integers_of_numpy_are_the_integers_they_are() -> None:
    made = fetch(tokens=np.int64(8), start=np.uint8(3), source=Source("h", np.int32(7), np.uint64(9)))
    assert (type(made.tokens), type(made.start), type(made.source.port), type(made.source.epoch)) == (int,) * 4
    given = offer(tokens=np.int16(8), generation=np.int64(2), final=np.bool_(True))
    assert given == offer(generation=2) and given.final is True and type(given.generation) is int
    plane = view(offsets=np.array([0]), block_stride=np.int64(256), blocks=np.int8(16), group=np.intp(0))
    assert plane == view() and all(type(x) is int for x in (*plane.offsets, plane.block_stride, plane.blocks))
    assert Config(lease=np.float64(5), port=np.int64(0), staging_bytes=np.int64(1 << 20)) == Config(
        lease=5.0, staging_bytes=1 << 20
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Agent, Agent, Directory, list[np.ndarray]]]:
    config = Config(backend=FAKE, transfer_timeout=20.0)
    memories = [np.full(BLOCKS * HEADS * TOKENS * UNIT, 7 * i, np.uint8) for i in range(2)]
    with (
        Agent(cache(memories[0]), config, "d") as d,
        Agent(cache(memories[1]), config, "p") as p,
        Directory(config, "p") as directory,
    ):
        directory.publish((p.descriptor,))
        yield p, d, directory, memories


CALLS: dict[str, tuple[Callable[[Agent, Directory], Any], str]] = {
    "no offer": (lambda a, _: a.offer(None), "offer must be a kvxfer Offer, not None"),
    "an offer is fetched": (lambda a, _: a.fetch(offer()), "fetch must be a kvxfer Fetch"),
    "offered, no blocks": (lambda a, _: a.offer(offer(blocks=BlockTable.of([[]]))), r"blocks\[0\] must list 2 blocks"),
    "too few blocks": (
        lambda a, _: a.offer(offer(tokens=9)),
        r"blocks\[0\] must list 3 blocks of 4 tokens for 9 tokens",
    ),
    "no groups": (
        lambda a, _: a.offer(offer(blocks=BlockTable())),
        "blocks must have one row for each of the cache's 1",
    ),
    "a block outside the cache": (
        lambda a, _: a.offer(offer(blocks=BlockTable.of([[1, BLOCKS]]))),
        r"blocks\[0\] must be ids below 16, the cache's blocks, not 16",
    ),
    "offered, none at a position": (
        lambda a, _: a.offer(offer(blocks=BlockTable.of([[1, -1]]))),
        r"blocks\[0\] must have a block at position 1, not -1",
    ),
    "a table without measure": (
        lambda a, _: a.fetch(fetch(blocks=BlockTable((b"\0" * (4 << 20),)))),
        "blocks must be at most",
    ),
    "revoke by a text": (lambda a, _: a.revoke("x", 1, "", True), "transfer must be a kvxfer TransferId"),
    "revoke nothing": (lambda a, _: a.revoke(T, -1, "", True), "generation must be at least 0"),
    "revoke for no reason": (lambda a, _: a.revoke(T, 1, None, True), "reason must be a str"),
    "revoke, gone or not": (lambda a, _: a.revoke(T, 1, "", None), "gone must be True or False"),
    "prepare, as a text": (lambda a, _: a.prepare(HERE, "x"), "own must be a kvxfer Source, not 'x'"),
    "kept and not gone": (lambda a, _: a.revoke(T, 1, "", False, kept=True), "kept must come with gone"),
    "an older generation": (
        lambda a, _: twice(a, {"generation": 2}, {"generation": 1}),
        "generation must be at least 2, not 1",
    ),
    "more behind the end": (lambda a, _: twice(a, {"tokens": 4}, {"tokens": 8}), "tokens must be at most 4, not 8"),
    "fewer tokens": (
        lambda a, _: twice(a, {"final": False}, {"tokens": 4, "final": False}),
        "tokens must be at least 8, not 4",
    ),
    "an end that is none": (lambda a, _: twice(a, {}, {"final": False}), "final must stay True within generation 1"),
    "another payload": (
        lambda a, _: twice(a, {"payload": b"a"}, {"payload": b"b"}),
        "payload must stay the same within generation 1",
    ),
    "more consumers": (lambda a, _: twice(a, {}, {"consumers": 3}), "consumers must be at most 1, not 3"),
    "a block twice": (lambda a, _: a.offer(offer(blocks=BlockTable.of([[3, 3]]))), "each block once, and block 3"),
    "behind a text": (lambda a, _: a.offer(offer(), after="x"), "after must be a kvxfer Fence, not 'x'"),
    "fetch into nothing": (
        lambda a, _: a.fetch(fetch(blocks=BlockTable.of([[]]))),
        "blocks must list at least one block",
    ),
    "fetch into no block": (
        lambda a, _: a.fetch(fetch(blocks=BlockTable.of([[-1, -1]]))),
        "blocks must list at least one block",
    ),
    "wait for a text": (lambda a, _: a.events("1"), "timeout must be a number of seconds, not '1'"),
    "listen with a text": (lambda a, _: a.listen("x"), "heard must be a function or None"),
    "wait for what cannot be": (lambda _a, _d: asyncio.run(readable(None, 1)), "source must be a kvxfer Readable"),
    "publish nothing": (lambda _, d: d.publish(None), "ranks must be a tuple of RankDescriptor, not None"),
    "renew a text": (lambda a, _: a.renew("x"), "transfer must be a kvxfer TransferId"),
    "cancel a number": (lambda a, _: a.cancel(7, ""), "handle must be a str"),
    "facts are numbers": (lambda a, _: a.identify({"model": 7}), "fact 'model'"),
    "copy an agent": (lambda a, _: copy.copy(a), "an agent belongs to the process that made it"),
    "publish a rank twice": (lambda a, d: d.publish((a.descriptor, a.descriptor)), "rank pp0/tp0 is there twice"),
}


@pytest.mark.parametrize("wrong", CALLS)
def test_a_wrong_call_is_answered_by_itself(wrong: str, pair: tuple[Agent, Agent, Directory, list[np.ndarray]]) -> None:
    p, d, directory, _ = pair
    call, told = CALLS[wrong]
    for agent in (p, d):
        with pytest.raises(KvxferError, match=told):
            call(agent, directory)
    assert not [e for agent in (p, d) for e in agent.events() if e.transfer == T]


AFTER_CLOSE: dict[str, Callable[[Agent, Directory], Any]] = {
    "offer": lambda a, _: a.offer(offer()),
    "fetch": lambda a, _: a.fetch(fetch()),
    "revoke": lambda a, _: a.revoke(T, 1, "", False),
    "renew": lambda a, _: a.renew(T),
    "cancel": lambda a, _: a.cancel("r", ""),
    "identify": lambda a, _: a.identify({}),
    "prepare": lambda a, _: a.prepare(HERE),
    "listen": lambda a, _: a.listen(print),
    "publish": lambda _, d: d.publish(()),
    "identify ": lambda _, d: d.identify({}),
}


@pytest.mark.parametrize("drained", [False, True], ids=["closed", "drained"])
@pytest.mark.parametrize("late", AFTER_CLOSE)
def test_a_call_after_close_says_so(late: str, drained: bool) -> None:
    memory = np.zeros(BLOCKS * HEADS * TOKENS * UNIT, np.uint8)
    config = Config(backend=FAKE)
    with Agent(cache(memory), config, "p") as agent, Directory(config, "p") as directory:
        if drained:  # and with an offer that nobody has fetched in time
            agent.offer(offer())
            agent.drain(0.01)
        agent.close(), directory.close()
        told = rf"^this (agent|directory) has been closed: call '{late.strip()}' before that, or make a new one$"
        with pytest.raises(ClosedError, match=told):
            AFTER_CLOSE[late](agent, directory)
        agent.listen(None)
        ends = [event for event in agent.events() if isinstance(event, Ended)]
        assert len(ends) == drained and not agent.events() and agent.close()


def outcome(agent: Agent, handle: str) -> Ended:
    ends: list[Ended] = []
    until(lambda: ends.extend(e for e in agent.events() if isinstance(e, Ended) and e.handle == handle) or ends)  # type: ignore[func-returns-value]
    return ends[0]


def test_an_honest_transfer_beside_wrong_calls_goes_through(
    pair: tuple[Agent, Agent, Directory, list[np.ndarray]],
) -> None:
    """While it waits for its blocks, everything that can be done wrong is done wrong, on its link."""
    p, d, directory, memories = pair
    table = BlockTable.of([[3, 9]])
    d.fetch(fetch(handle="honest", source=Source("127.0.0.1", directory.source.port, 0), blocks=table))
    with pytest.raises(ArgumentError, match="handle must be unused"):
        d.fetch(fetch(handle="honest", source=directory.source, blocks=table))
    for call, _ in CALLS.values():
        for agent in (p, d):
            with pytest.raises(KvxferError):
                call(agent, directory)
    p.offer(offer())
    assert outcome(d, "honest").outcome.delivered
    moved = memories[0].reshape(BLOCKS, -1)
    assert (moved[[3, 9]] == 7).all() and not moved[[1, 2]].any()


@pytest.mark.parametrize(
    ("rank", "heads", "held"),
    [(Rank(), Heads(0, 2, HEADS, TOKENS * UNIT), "heads 0 to 1 of 4"), (Rank(0, 1), None, "rank pp0/tp1")],
)
def test_a_rank_of_several_has_to_say_of_which_engine(rank: Rank, heads: Heads | None, held: str) -> None:
    """Else each rank would read as if it were alone, and the producer would free its blocks with the first of them."""
    memory = np.zeros(BLOCKS * HEADS * TOKENS * UNIT, np.uint8)
    with Agent(cache(memory, rank, heads), Config(backend=FAKE)) as agent:
        with pytest.raises(ArgumentError, match=f"own must name this engine's directory .*{held}"):
            agent.fetch(fetch())
        assert agent.events() == [] and not agent.stats().fetches


def test_a_stage_of_several_has_to_say_of_which_engine() -> None:
    """The first stage looks like a whole engine, until it is seen what the producer has."""
    config = Config(backend=FAKE, transfer_timeout=20.0)
    size = BLOCKS * HEADS * TOKENS * UNIT
    whole, half = np.zeros(2 * size, np.uint8), np.zeros(size, np.uint8)
    with (
        Agent(cache(half), config, "d") as d,
        Agent(cache(whole, layers=("0", "1"), offsets=(0, size)), config, "p") as p,
        Directory(config, "p") as directory,
    ):
        directory.publish((p.descriptor,))
        p.offer(offer())
        d.fetch(fetch(source=directory.source))
        failure = outcome(d, "r").outcome.failure
        assert failure is not None and "no layer '1', plane 'kv'" in failure.detail and "'own'" in failure.detail
        assert p.events() == []


def test_blocks_that_were_offered_stay_until_the_next_generation(
    pair: tuple[Agent, Agent, Directory, list[np.ndarray]],
) -> None:
    """A consumer may have read the first chunk already, and would get the second from other blocks than its own."""
    p, d, directory, _ = pair
    again = TransferId("own/1/again", 0)
    first = offer(transfer=again, tokens=4, final=False, blocks=BlockTable.of([[1]]))
    p.offer(first)
    with pytest.raises(
        ArgumentError, match=r"blocks\[0\] must keep block 1 at position 0, not have 3 there, within gen"
    ):
        p.offer(offer(transfer=again, blocks=BlockTable.of([[3, 2]])))
    with pytest.raises(ArgumentError, match="digest must stay the same within generation 1"):
        p.offer(offer(transfer=again, digest=b"other"))
    p.offer(first)  # twice is no change
    p.offer(offer(transfer=again, generation=2, blocks=BlockTable.of([[3, 2]])))
    with pytest.raises(ArgumentError, match="must keep block 2 at position 1"):
        p.offer(offer(transfer=again, generation=2, blocks=BlockTable.of([[3, 4]])))
    d.fetch(fetch(handle="again", transfer=again, source=directory.source, blocks=BlockTable.of([[5, 6]])))
    assert outcome(d, "again").outcome.delivered
    assert outcome(p, str(again)).outcome.delivered
    p.offer(offer(transfer=again, generation=2, blocks=TABLE))  # too late to mean anything
    until(lambda: not p._calls._offers)  # nothing is kept of it
