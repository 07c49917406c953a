"""The engines above the machines: what they ask for, and what they may rely on."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Action, Ended, GenerationReleased, Released
from kvxfer.values import BlockTable, Fetch, Offer
from tests.protocol.world.base import (
    D_TOKENS,
    FREE,
    LAYERS,
    P_TOKENS,
    RANKS,
    START,
    TIMEOUT,
    UNIT,
    Agent,
    check,
    content,
)

if TYPE_CHECKING:
    from tests.protocol.world.world import World


@dataclass
class Transitions:
    """A transfer as one producer rank's engine sees it, from the first chunk until it has its blocks back."""

    transfer: TransferId
    total: int
    generation: int
    blocks: list[int]
    tokens: int = 0
    told: int = -1  # the generation that was offered or revoked last
    over: bool = False  # the engine wants no more of it


class ProducerEngine:
    """Prefills requests. Each rank works through the same orders at its own pace."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lives: list[dict[TransferId, Transitions]] = [{} for _ in range(RANKS)]
        self.orders: list[deque[Callable[[], None]]] = [deque() for _ in range(RANKS)]
        # Generations of which each rank has been told the outcome, and the release.
        self.ended: dict[tuple[int, TransferId], set[int]] = defaultdict(set)
        self.released: dict[tuple[int, TransferId], set[int]] = defaultdict(set)
        # The generation each rank's machine has last heard an offer of: the engine may be ahead of it.
        self.heard: dict[tuple[int, TransferId], int] = {}
        self.busy: Counter[TransferId] = Counter()  # ranks that have orders for it
        self.revoked: dict[tuple[int, int], int] = {}  # rank and generation -> when it was given up
        # What each rank has revoked of a transfer that goes on, and has not heard to be read no more.
        self.read: dict[tuple[int, TransferId], int] = {}
        self.answered: set[TransferId] = set()  # all of it was offered once, on all ranks

    @property
    def known(self) -> set[TransferId]:
        """Transfers that are being prefilled or held."""
        return set(self.busy).union(*self.lives)

    def work(self, rank: int) -> None:
        if self.orders[rank]:
            self.orders[rank].popleft()()

    def prefill(self, transfer: TransferId, total: int) -> None:
        """A request arrives."""
        script, calm = self.world.script, self.world.calm
        if transfer in self.known:
            return
        chunks = sorted({1 + script.pick(total), total})
        generation = next(self.world.generations)
        again = next(self.world.generations)
        preempts = self.world.setting.preempts
        plot = (
            12 if calm else script.pick(14)
        )  # 0: abort, up to ``preempts``: preempt and again, 12 on: abort midway, else well
        midway = not calm and plot >= 12 and len(chunks) > 1
        kept = midway or (plot == 0 and bool(script.pick(2)))  # pinned: who reads it may finish with what there is
        computed = 1 if midway else script.pick(len(chunks) + 1) if plot == 0 else len(chunks)
        self.busy[transfer] = RANKS
        for r, line in enumerate(self.orders):
            line.append(lambda r=r: self._start(r, transfer, total, generation))
            line += self._layers(r, transfer, chunks[:computed])
            if midway or plot == 0:
                line.append(lambda r=r: self._abort(r, transfer, kept))
            if 1 <= plot <= preempts:
                line.append(lambda r=r: self._preempt(r, transfer, again))
                line += self._layers(r, transfer, chunks)
            line.append(lambda: self._planned(transfer))

    def _planned(self, transfer: TransferId) -> None:
        self.busy[transfer] -= 1
        if not self.busy[transfer]:
            del self.busy[transfer]
            self.answered.add(transfer)

    def _start(self, r: int, transfer: TransferId, total: int, generation: int) -> None:
        if transfer not in self.lives[r]:
            blocks = self.world.producers[r].take(-(-total // P_TOKENS), transfer)
            if blocks is not None:
                self.lives[r][transfer] = Transitions(transfer, total, generation, blocks)

    def _layers(self, r: int, transfer: TransferId, chunks: list[int]) -> list[Callable[[], None]]:
        """Orders to compute these chunks, layer by layer."""
        each = itertools.product(chunks, range(LAYERS))
        return [partial(self._layer, r, transfer, tokens, layer) for tokens, layer in each]

    def _chunk(self, r: int, transfer: TransferId, tokens: int) -> None:
        for layer in range(LAYERS):
            self._layer(r, transfer, tokens, layer)

    def _layer(self, r: int, transfer: TransferId, tokens: int, layer: int) -> None:
        """Some more tokens are computed in one layer and offered, with the blocks of all of them so far, or wait for other layers."""
        life, agent, last = self.lives[r].get(transfer), self.world.producers[r], layer == LAYERS - 1
        if life is None or life.over:
            return
        for t in range(life.tokens, tokens):
            cell = agent.view()[layer, life.blocks[t // P_TOKENS], t % P_TOKENS]
            what = content(transfer, life.generation, r * LAYERS + layer, t)
            cell[:] = np.frombuffer(what.to_bytes(UNIT, "little"), np.uint8)
        if not last and self.world.script.pick(4) == 3:
            return
        life.told = life.generation
        if last:
            life.tokens = max(life.tokens, tokens)
        table, final = BlockTable.of([life.blocks[: -(-tokens // P_TOKENS)]]), last and tokens == life.total
        offer = Offer(transfer, b"digest", life.generation, tokens, table, final, bands=0 if last else layer + 1)
        agent.revocations.offered(transfer, life.generation)

        def call() -> list[Action]:
            self.heard[r, transfer] = offer.generation
            return agent.machine.offer(offer, self.world.now)

        self.world.say(agent, call)

    def _revoke(self, r: int, life: Transitions, reason: str, gone: bool, kept: bool = False) -> None:
        agent = self.world.producers[r]
        life.told, life.over = life.generation, life.over or gone
        transfer, generation = life.transfer, life.generation

        def call() -> list[Action]:
            why = Failure(FailureKind.WITHDRAWN if gone else FailureKind.REVOKED, reason)
            actions = agent.machine.revoke(transfer, generation, why, gone, self.world.now, kept)
            if declared:
                agent.revocations.take_in()
            return actions

        if not kept:
            self.revoked.setdefault((r, generation), next(self.world.moments))
        declared = not kept and agent.revocations.declare(transfer)
        self.world.say(agent, call)

    def _preempt(self, r: int, transfer: TransferId, again: int) -> None:
        """The blocks are taken away at once, and the request is computed anew in others."""
        life, agent = self.lives[r].get(transfer), self.world.producers[r]
        if life is None or life.over:
            return
        self.read[r, transfer] = life.generation
        self._revoke(r, life, "preempted", gone=False)
        agent.give(life.blocks)
        life.generation, life.tokens = again, 0
        life.blocks = agent.take(-(-life.total // P_TOKENS), transfer) or []
        if not life.blocks:
            self._revoke(r, life, "aborted for want of blocks", gone=True)

    def _abort(self, r: int, transfer: TransferId, kept: bool) -> None:
        life = self.lives[r].get(transfer)
        if life is not None and not life.over:
            self._revoke(r, life, "aborted", gone=True, kept=kept)

    def report(self, agent: Agent, event: Ended | Released | GenerationReleased) -> None:
        if not isinstance(event, Ended) and event.generation >= self.read.get((agent.rank, event.transfer), 0):
            self.read.pop((agent.rank, event.transfer), None)
        if isinstance(event, GenerationReleased):
            ended = self.ended[agent.rank, event.transfer]
            before = max((g for g in ended if g < event.generation), default=-1)
            self.world.backend.check_quiet(agent, event.transfer, range(before + 1, event.generation + 1))
            return
        life, generation = self.lives[agent.rank].get(event.transfer), event.generation
        ended, released = self.ended[agent.rank, event.transfer], self.released[agent.rank, event.transfer]
        if isinstance(event, Ended):
            check(life is not None and generation <= life.told, f"{event} of what was never offered")
            check(generation not in ended, f"second outcome {event}")
            ended.add(generation)
            agent.revocations.over(event.transfer, generation)
            return
        check(generation in ended - released, f"{event} without an outcome, or again")
        before = max((g for g in ended if g < generation), default=-1)
        self.world.backend.check_quiet(agent, event.transfer, range(before + 1, generation + 1))
        released.add(generation)
        if life is not None:
            self.world.later(1.0, None, lambda: self._heard(agent, life, generation))

    def _heard(self, agent: Agent, life: Transitions, generation: int) -> None:
        """The engine learns that a transfer is over, which it may have offered more of, or anew, meanwhile."""
        r = agent.rank
        if not agent.alive or self.lives[r].get(life.transfer) is not life:
            return
        if generation == life.generation:
            agent.give(life.blocks)
            del self.lives[r][life.transfer]
        else:
            self._revoke(r, life, "all is read", gone=True)


@dataclass
class Wish:
    """A fetch as a consumer rank's engine sees it."""

    spec: Fetch
    blocks: list[int]
    owner: object
    due: float
    begun: bool = False
    ended: Ended | None = None


class ConsumerEngine:
    """Fetches requests, all ranks at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.names = count(1)
        self.wishes: dict[tuple[int, str], Wish] = {}
        self.outcomes: Counter[str] = Counter()
        self.quorum: dict[str, set[int]] = defaultdict(set)  # request -> the generations that its ranks were delivered
        self.ranks: dict[str, list[Ended]] = defaultdict(list)  # request -> what its ranks have reported

    def fetch(self, transfer: TransferId, total: int, source: Source, enough: int | None = None) -> None:
        world = self.world
        if any(w.spec.transfer == transfer for w in self.wishes.values()):
            return
        start = world.script.pick(total) if world.script.chance(64) else 0
        name = f"request {next(self.names)}"
        offered = transfer in world.prefills.answered and world.script.chance(128)
        if enough is None:
            enough = 1 + world.script.pick(total) if world.script.pick(2) else 0
        for r, agent in enumerate(world.consumers):
            blocks = agent.take(-(-total // D_TOKENS), object())
            if blocks is None:
                continue
            agent.view()[:, blocks] = FREE
            table = BlockTable.of([blocks])
            spec = Fetch(name, transfer, b"digest", source, table, start, total, offered=offered, enough=enough)
            self.wishes[r, name] = Wish(spec, blocks, agent.owner[blocks[0]], world.now + START)
            world.perform(agent, agent.machine.fetch(spec, world.now))

    def begun(self, agent: Agent, attempt: int) -> None:
        """A first part is announced: from now on the rest is due."""
        for wish in self.wishes.values():
            if wish.owner is agent.tries.get(attempt) and not wish.begun:
                wish.begun, wish.due = True, self.world.now + TIMEOUT

    def cancel(self) -> None:
        live = [key for key, w in self.wishes.items() if w.ended is None]
        if live:
            r, name = live[self.world.script.pick(len(live))]
            agent = self.world.consumers[r]
            self.world.perform(agent, agent.machine.cancel(name, "client left", self.world.now))

    def report(self, agent: Agent, event: Ended | Released) -> None:
        wish = self.wishes.get((agent.rank, event.handle))
        check(wish is not None, f"{event} of a fetch that is over or was never made")
        assert wish is not None
        if isinstance(event, Ended):
            check(wish.ended is None, f"second outcome {event} after {wish.ended}")
            check(self.world.now <= wish.due + 1.0, f"{event} came after its deadline, which was {wish.due}")
            asked = wish.owner in agent.tries.values()
            check(not (event.stages.unasked and asked), f"{event} would count twice: a producer rank knows of it")
            wish.ended = event
            self.outcomes[event.outcome.kind or "delivered"] += 1
            if event.stages.unasked:
                self.outcomes["unasked"] += 1
            if event.short is not None:
                self.outcomes["short"] += 1
            self._count(event)
        else:
            check(wish.ended is not None, f"{event} before its outcome")
            del self.wishes[agent.rank, event.handle]
        if wish.ended and wish.ended.outcome.delivered:
            self._compare(agent, wish)
        if isinstance(event, Released):
            agent.give(wish.blocks)

    def _count(self, event: Ended) -> None:
        """The engine's own outcome, once all ranks have theirs."""
        ranks = self.ranks[event.handle]
        ranks.append(event)
        if event.outcome.delivered:
            self.quorum[event.handle].add(event.generation)
        if len(ranks) == RANKS:
            generations = self.quorum.pop(event.handle, set())
            if all(e.outcome.delivered for e in ranks):
                self.outcomes["whole" if len(generations) == 1 else "mixed"] += 1

    def _compare(self, agent: Agent, wish: Wish) -> None:
        """Right bytes, all of one generation, which no rank of the producer gave up before the last of them was here."""
        spec, ended, prefills = wish.spec, wish.ended, self.world.prefills
        assert ended is not None
        end = spec.tokens
        if ended.short is not None:
            end = ended.short
            check(0 < spec.enough <= end < spec.tokens, f"{ended} has too few tokens")
        words = agent.view()[:, wish.blocks].reshape(RANKS * LAYERS, -1, UNIT).copy().view("<u4")[..., 0]
        for layer in range(RANKS * LAYERS):
            for t in [*range(end), *range(spec.tokens, words.shape[1])]:
                want = content(spec.transfer, ended.generation, layer, t) if spec.start <= t < spec.tokens else FREE
                check(words[layer, t] == want, f"{spec.transfer} token {t} layer {layer}: wrong bytes were delivered")
        if spec.source == self.world.source:
            for rank in range(RANKS):
                given_up = prefills.revoked.get((rank, ended.generation))
                held = given_up is None or given_up > agent.written[wish.owner]
                check(
                    held, f"{spec.transfer} was delivered, but rank {rank} gave generation {ended.generation} up before"
                )
