"""A simulated engine that holds conversations: it caches prefixes, loads them from others, and lets others load its own."""

from __future__ import annotations

import ast
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer.config import Config
from kvxfer.engine import BlockPins, HeldPrefix, Inquiry, Prefix, PrefixIndex, PrefixPool, Ticket, Update
from kvxfer.facts import sealed
from kvxfer.identity import Source, TransferId
from kvxfer.testing.engine.defaults import FACTS
from kvxfer.testing.engine.memory import PagedMemory
from kvxfer.testing.engine.paged import PagedEngine
from kvxfer.values import BlockTable

Media = tuple[str, int, int]


@dataclass(eq=False)
class Turn:
    """One request of a conversation.

    Attributes:
        request: Its name.
        prompt: Its token ids.
        answer: The token ids that it generates. The last one is not computed, as in any engine.
        cached: Tokens that were found in the engine's own cache.
        loaded: Tokens that came from another engine.
        table: Its blocks, while it runs.
        done: Whether it is over.
    """

    request: str
    prompt: list[int]
    answer: list[int]
    salt: str
    media: tuple[Media, ...]
    cached: int = 0
    loaded: int = 0
    table: list[int] = field(default_factory=list)
    admitted: bool = False
    done: bool = False

    @property
    def computed(self) -> list[int]:
        """The tokens of which there is KV at the end."""
        return [*self.prompt, *self.answer[:-1]]

    @property
    def content(self) -> bytes:
        """What the KV of these tokens is drawn from (``by_tokens``)."""
        ids = np.asarray(self.computed, "<i8").tobytes()
        return repr((self.salt, self.media)).encode() + b"\0" + ids

    @property
    def fresh(self) -> int:
        """How many tokens of the prompt the engine has computed itself."""
        return len(self.prompt) - self.cached - self.loaded


class ConversationEngine(PagedEngine):
    """A ``PagedEngine`` with a cache of prefixes, whose KV depends on all tokens so far.

    Args:
        config: As for ``PagedEngine``.
        ranks, blocks, tokens, dims: As for ``PagedMemory``.
        more: Further arguments of ``PagedEngine``.

    Attributes:
        index: What it has computed.
        pool: Its blocks.
        open: The turns that are not over, by request.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | None = None,
        *,
        ranks: int = 1,
        blocks: int = 64,
        tokens: int = 4,
        dims: str = "layer block head token unit",
        facts: Mapping[str, str] = FACTS,
        **more: Any,
    ) -> None:
        memory = PagedMemory(ranks=ranks, blocks=blocks, tokens=tokens, dims=dims, content=_by_tokens)
        self.pool = PrefixPool(blocks, tokens)
        super().__init__(config, memory, facts=facts, pins=BlockPins(blocks // 2, self.pool), **more)
        self.index: PrefixIndex[Turn] = PrefixIndex(blocks * tokens)
        self.open: dict[str, Turn] = {}
        self.scheduler.holds = self.holds

    def holds(self, inquiry: Inquiry) -> HeldPrefix | None:
        """Return what the cache has of the tokens of an inquiry."""
        found = self.index.find(inquiry.chain)
        if found is None:
            return None
        blocks = self.pool.prefix(found.name.computed[: found.tokens], _salt(found.name))
        self.pool.free(blocks[::-1])  # what is taken of them is pinned before anybody else gets a block
        return HeldPrefix(len(blocks) * self.memory.tokens, BlockTable.of([blocks]))

    def begin(
        self,
        request: str,
        prompt: Sequence[int],
        answer: Sequence[int] = (0,),
        sources: Sequence[Source] = (),
        *,
        salt: str = "",
        media: Sequence[Media] = (),
        ticket: Ticket | None = None,
        offered: bool = False,
    ) -> Turn:
        """Begin a request: what others hold of its prompt is asked for.

        Args:
            request: Its name.
            prompt: Its token ids.
            answer: The token ids that it will generate.
            sources: Whom to ask.
            salt: What its KV depends on besides.
            media: Media among its tokens, as for ``Prefix``.
            ticket: An offer of its prompt, to be loaded.
            offered: Whether its prompt is offered to others.
        """
        self._be_found()
        turn = self.open[request] = Turn(request, list(prompt), list(answer), salt, tuple(media))
        turn.table = self.tables[request] = self.pool.prefix(turn.prompt[:-1], _salt(turn))
        turn.cached = len(turn.table) * self.memory.tokens
        if offered:
            transfer = TransferId.mint(self.scheduler.source.epoch, request)
            assert self.scheduler.offer(request, transfer, self.prefix(turn).chain().links[-16:], len(turn.prompt))
        if ticket is not None:
            self.scheduler.load(
                request, ticket.transfer, ticket.digest, ticket.source, len(turn.prompt) - 1, offered=True
            )
        elif sources:
            self.scheduler.ask(request, self.prefix(turn), sources, len(turn.prompt) - 1, computed=turn.cached)
        return turn

    def prefix(self, turn: Turn) -> Prefix:
        """Return what the KV of a turn depends on."""
        return Prefix(turn.computed, model=sealed(self.facts), salt=turn.salt or None, media=turn.media)

    def finish_turn(self, turn: Turn, beside: Sequence[PagedEngine] = (), timeout: float = 60.0) -> Turn:
        """Make steps, and let other engines make theirs, until a turn is over.

        Raises:
            AssertionError: It is not, within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while not turn.done:
            assert time.monotonic() < end, f"{turn.request} does not end within {timeout:g} s"
            for engine in (self, *beside):
                engine.step(timeout=0.001)
        return turn

    def step(self, *more: Any, **named: Any) -> Update:
        """Make a step, in which turns go on whose tokens are known to come, or to be computed."""
        for turn in list(self.open.values()):
            if not turn.admitted:
                self._admit_turn(turn)
        update = super().step(*more, **named)
        for request in (update.loaded | update.failed.keys()) & self.open.keys():
            turn = self.open[request]
            turn.loaded *= request in update.loaded
            self._compute(turn)
        return update

    def drop_cache(self) -> None:
        while not self.scheduler.withdraw_all("the cache is dropped"):
            self.step()
        self.pool = PrefixPool(self.memory.blocks, self.memory.tokens)
        self.scheduler._pins.bind(self.pool)
        self.index.clear()

    def _admit_turn(self, turn: Turn) -> None:
        external = self.scheduler.loadable(turn.request, turn.cached)
        if external is None:
            return
        if not self.pool.grow(turn.table, len(turn.computed)):
            self.scheduler.short_of_blocks()
            return
        turn.admitted, turn.loaded = True, external
        self.scheduler.allocated(turn.request, BlockTable.of([turn.table]), external)
        if external:
            self._loads[turn.request] = turn.content, turn.cached + external
        else:
            self._compute(turn)

    def _compute(self, turn: Turn) -> None:
        """Compute what has not been loaded, and end the turn with the step after that."""
        start, end = turn.cached + turn.loaded, len(turn.computed)
        self.memory.compute(turn.content, turn.table, start, end)
        table = BlockTable.of([turn.table])
        self.scheduler.runs(turn.request, start, end - start, table)
        self.pool.remember(turn.computed, turn.table, _salt(turn))
        self.index.add(self.prefix(turn), turn)
        turn.done = True
        del self.open[turn.request]
        if not self.scheduler.finished(turn.request, table, complete=True):
            self._give_back(turn.request)

    def _give_back(self, request: str) -> None:
        self.pool.free(self.tables.pop(request, [])[::-1])


def _salt(turn: Turn) -> bytes:
    return repr((turn.salt, turn.media)).encode() if turn.salt or turn.media else b""


def _by_tokens(content: bytes, tokens: int) -> np.ndarray:
    """Return KV that depends, at each token, on all tokens so far."""
    more, _, ids = content.partition(b"\0")
    salt, media = ast.literal_eval(more.decode())
    running, rows = hashlib.blake2b(salt.encode(), digest_size=16), []
    for at in range(tokens):
        running.update(repr([item for item in media if item[1] == at]).encode() + ids[8 * at : 8 * at + 8])
        rows.append(running.digest())
    drawn = np.frombuffer(b"".join(rows), np.uint8).reshape(tokens, 1, 1, 16)
    places = np.arange(3 * 4, dtype=np.uint8).reshape(1, 3, 4, 1)
    return np.asarray(drawn + places)
