"""Blocks are never reused under a transfer: our own references on vLLM's block pool.

Each test has vLLM give blocks up that a transfer may still touch, then asks the pool for every block that it has. With
our references those blocks are not among them; the same test without references shows that they would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxfer.engine import BlockPins
from tests.control.conftest import until
from tests.vllm.cases import OFFER, both, check, decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import HYBRID, Group, PlayedEngine, answer, prompt
from tests.vllm.wire import Load, Wire

HELD = pytest.mark.parametrize("held", [True, False], ids=["held", "control"])


@pytest.fixture
def references(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the negative control references are believed to be held, and are not."""
    if not held:
        monkeypatch.setattr(BlockPins, "keep", lambda self, holder, blocks: True)


@contextmanager
def everything(engine: PlayedEngine) -> Iterator[set[int]]:
    """All blocks that the engine could hand out now, handed out and written over."""
    blocks = engine.pool.get_new_blocks(engine.free)
    engine.memory[[b.block_id for b in blocks]] = -7
    yield {b.block_id for b in blocks}
    engine.pool.free_blocks(blocks)


def begin(d: PlayedEngine, wire: Wire, *others: PlayedEngine) -> Load:
    """Have D's one load found its producer, of which D asks first whether it has begun; nothing has moved yet."""
    until(lambda: bool(d.step() and wire.loads(d)))
    (load,) = wire.loads(d)
    for _ in range(20):
        if wire.begin(load):
            return load
        for other in others:
            other.step()
    raise AssertionError("nothing is offered")


def blocks_of(load: Load) -> tuple[set[int], set[int]]:
    """What a load reads at P, and what it writes at D."""
    assert load.offer is not None
    return tuple({int(b) for row in rows for b in row if b >= 0} for rows in (load.offer.blocks, load.fetch.blocks))  # type: ignore[return-value]


@HELD
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.usefixtures("references")
def test_a_failed_load_that_still_writes(make: Make, wire: Wire, held: bool, policy: str) -> None:
    """D's request goes on (or ends) at once, elsewhere; the late bytes hit nobody."""
    p, d = make(), make(policy=policy)
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    load = begin(d, wire)
    _, written = blocks_of(load)
    wire.fail(load, "the peer is silent", quiet=False)
    d.run(p, until=name)
    assert d.done[name].reason == ("length" if policy == "recompute" else "error")
    with everything(d) as handed_out:
        assert held == written.isdisjoint(handed_out)
    wire.quiet(load)
    d.run()
    with everything(d) as handed_out:
        assert written <= handed_out


@HELD
@pytest.mark.usefixtures("references")
def test_late_bytes_of_a_failed_load(make: Make, wire: Wire, held: bool) -> None:
    """What the request computes anew stands in other blocks, so its tokens are right. Without references they are not:
    the pool gives it the same blocks, and the bytes come after its prefill."""
    p, d = make(), make(blocks=30)
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params, n=20)
    load = begin(d, wire)
    wire.fail(load, "the peer is silent", quiet=False)
    while d.computed.get(name, 0) < 95:
        d.step()
    wire.scribble(load)
    d.run(p, until=name)
    assert held == (d.done[name].tokens == answer(text, 20))
    wire.quiet(load)


@pytest.mark.parametrize("end", ["aborted", "fetched"])
def test_a_failed_load_that_still_writes_though_its_request_s_own_offer_is_over(
    make: Make, wire: Wire, end: str
) -> None:
    """One request may load and offer: what is kept for the one has nothing to do with the other."""
    p, d = make(), make()
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params | OFFER | {"do_remote_prefill": True}, n=8)
    load = begin(d, wire)
    _, written = blocks_of(load)
    wire.fail(load, "the peer is silent", quiet=False)
    while d.computed.get(name, 0) < 95:
        d.step()
    if end == "aborted":
        d.abort(name)
    else:
        d.run(until=name)
        d.lease_ends()
    d.steps(5)
    with everything(d) as handed_out:
        assert written.isdisjoint(handed_out)
    wire.quiet(load)
    d.run(p)


@HELD
@pytest.mark.usefixtures("references")
def test_an_aborted_load_that_still_writes(make: Make, wire: Wire, held: bool) -> None:
    p, d = make(HYBRID), make(HYBRID)
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    load = begin(d, wire)
    _, written = blocks_of(load)
    d.abort(name)
    d.steps(3)
    assert name not in d.scheduler.requests, "vLLM still waits for a request that is over"
    with everything(d) as handed_out:
        assert held == written.isdisjoint(handed_out)
    wire.quiet(load)
    d.run(p)


@HELD
@pytest.mark.usefixtures("references")
def test_an_aborted_offer_that_is_still_read(make: Make, wire: Wire, held: bool) -> None:
    """P's client goes away while D reads what P had computed, all of the prompt. vLLM has no hook to keep an aborted request's
    blocks but ours."""
    p, d = make(), make()
    text = prompt(90)
    to_p, to_d = both(p, "job")
    a = p.add(text, to_p, n=50)
    p.step()  # which begins with it
    wire.paused = True
    b = d.add(text, to_d)
    load = begin(d, wire, p)
    read, _ = blocks_of(load)
    p.abort(a)
    with everything(p) as handed_out:
        assert held == read.isdisjoint(handed_out)
    p.steps(2)
    assert p.busy, "without steps P does not hear that the blocks are quiet"
    wire.read(load)
    assert wire.settle(load), "what P had computed is good, and D may finish with it"
    d.run(p, until=b)
    assert (d.done[b].tokens == answer(text, 4)) == held, "without references D reads what others have written there"
    p.run()


@HELD
@pytest.mark.parametrize("window", [23, 24, 25, 32])
@pytest.mark.usefixtures("references")
def test_windows_that_move_on(make: Make, held: bool, window: int) -> None:
    """vLLM gives the blocks behind a window up as P decodes; D wants those at the end of the prompt. Without references
    D's tokens are wrong."""
    groups = Group(), Group(window=window)
    p, d = make(groups, blocks=100), make(groups)
    text = prompt(90)
    a = p.add(text, OFFER, n=60)
    while len(p.said.get(a, [])) < 30:
        p.step()
    first = (len(text) - window) // p.block
    ends = set(p.tables[a][1][first : len(text) // p.block + 1])
    with everything(p) as handed_out:
        assert held == ends.isdisjoint(handed_out)
    p.run(until=a)
    params = p.done[a].params
    assert params is not None
    b = d.add(text, params)
    d.run(p, until=b)
    assert (d.done[b].tokens == answer(text, 4)) == held
    assert d.computed[b] == 1 + 3


@HELD
@pytest.mark.usefixtures("references")
def test_a_window_that_moves_on_by_one_token(make: Make, held: bool) -> None:
    """The window's edge lies on a block's: with its prompt's last token P gives up what D needs to compute that token."""
    groups = Group(), Group(window=24)
    p, d = make(groups), make(groups)
    text = prompt(16 * 4 + 23)
    params = prefill(p, text)
    with everything(p):
        pass
    b = d.add(text, params)
    d.run(p, until=b)
    assert (d.done[b].tokens == answer(text, 4)) == held
    assert d.computed[b] == 1 + 3


def test_a_held_offer(make: Make, wire: Wire) -> None:
    """A request that ended well: vLLM keeps its blocks until its workers say that they may be freed."""
    p, d = make(), make()
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    b = d.add(text, params)
    load = begin(d, wire)
    read, _ = blocks_of(load)
    p.steps(5)
    with everything(p) as handed_out:
        assert read.isdisjoint(handed_out)
    wire.paused = False
    d.run(p, until=b)
    check(d, b, text)


def test_quarantine_has_a_limit(make: Make, wire: Wire) -> None:
    """Loads that fail and do not get quiet may keep a quarter of the pool; more wait with their requests, which keep their
    own blocks."""
    p, d = make(blocks=200), make(blocks=100)
    texts = [prompt(90, seed=i) for i in range(6)]
    all_params = [prefill(p, text) for text in texts]
    wire.paused = True
    names = [d.add(text, params) for text, params in zip(texts, all_params, strict=True)]
    d.steps(2)
    loads = wire.loads(d)
    for load in loads:
        wire.begin(load)
        wire.fail(load, "the peer is silent", quiet=False)
    d.steps(30)
    waiting = [name for name in names if name not in d.done]
    assert len(waiting) == 2 and all(d.status(name) == "WAITING_FOR_REMOTE_KVS" for name in waiting)
    with everything(d) as handed_out:
        assert handed_out.isdisjoint(set().union(*(blocks_of(load)[1] for load in loads)))
    for load in loads:
        wire.quiet(load)
    d.run(p)
    for name, text in zip(names, texts, strict=True):
        check(d, name, text)


def test_aborts_have_a_limit(make: Make, wire: Wire) -> None:
    """Beyond it blocks are given back, and the revoked generation alone keeps D from taking what it read."""
    p, d = make(blocks=40), make(blocks=200)
    texts = [prompt(90, seed=i) for i in range(3)]
    wire.paused = True
    at_p, at_d = [], []
    for i, text in enumerate(texts):
        to_p, to_d = both(p, f"job{i}")
        at_p.append(p.add(text, to_p, n=50))
        at_d.append(d.add(text, to_d))
    p.steps(8)
    d.steps(2)
    for load in wire.loads(d):
        assert wire.begin(load)
    for name in at_p:
        p.abort(name)
    assert p.free >= 39 - 10
    p.steps(2)
    wire.paused = False
    d.run(p)
    for name, text in zip(at_d, texts, strict=True):
        check(d, name, text)


def test_a_transfer_that_fails_is_not_begun_again_while_it_moves(make: Make, wire: Wire) -> None:
    p, d = make(), make()
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    load = begin(d, wire)
    wire.fail(load, "the peer is silent", quiet=False)
    d.run(until=name)
    again = d.add(text, params)
    d.run(until=again)
    check(d, again, text)
    assert wire.loads(d) == [load]
    wire.quiet(load)
    d.run(p)
    wire.paused = False
    decode(d, text, params, p)
