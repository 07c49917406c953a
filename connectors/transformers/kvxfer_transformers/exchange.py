"""Move the KV of ``model.generate`` from one process to another."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticLayer

from kvxfer import ArgumentError, Config, Failure, FailureKind, KvxferError, Ticket
from kvxfer.memory.registry import space_for
from kvxfer_transformers.arena import Arena
from kvxfer_transformers.identity import model_facts, prompt_digests
from kvxfer_transformers.layers import UnsupportedCacheError, check_layers, forms_of, held, kept
from kvxfer_transformers.prompts import padding, token_ids
from kvxfer_transformers.side import SingleProcess
from kvxfer_transformers.ticket import BatchTicket

__all__ = ["CacheExchange"]

LOOK_S = 0.05
"""Seconds after which a waiting thread looks again, because another thread may have handled the event that it waits for."""
GRACE_S = 30.0
"""How much longer than a transfer's own deadline a fetch waits for its end."""


@dataclass(frozen=True)
class _Row:
    """One row of a batch that is being fetched."""

    request: str
    blocks: list[int]
    tokens: int


class CacheExchange:
    """Offers what ``generate()`` keeps in its cache to other processes, and fetches what they offer.

    Make one for each model in a process; it may do both. Any thread may call any method. The exchange
    has memory of its own, into which an offered cache is copied, so you may go on using or drop the cache as soon as ``offer``
    has returned. Each ticket serves one ``fetch``.

    Args:
        model: A causal language model, with the weights and adapters that it will compute with.
        config: Settings of kvxfer, by name (``{"backend": "tcp", "listen": "0.0.0.0"}``); see ``kvxfer.Config``.
        tokens: The room in tokens for all rows that are offered and not fetched yet, or are being fetched.
        name: This engine's name in the logs of other engines.

    Raises:
        ArgumentError: ``tokens`` is not a positive integer.
        UnsupportedCacheError: The model keeps something in its cache that cannot be moved.
        ConfigError: A setting is wrong.
        TransportError: The back end does not work here.
    """

    def __init__(
        self, model: Any, config: Mapping[str, Any] | None = None, *, tokens: int = 8192, name: str = "transformers"
    ) -> None:
        settings = Config.from_mapping({} if config is None else config)
        if not isinstance(tokens, int) or tokens <= 0:
            raise ArgumentError(f"tokens must be a positive integer, not {tokens!r}")
        try:
            space_for(model.device.type)
        except ArgumentError as e:
            raise UnsupportedCacheError(f"the model is on {model.device}: {e}") from e
        self._model, self._config = model, settings
        self._facts = model_facts(model, settings)
        self._arena = Arena(forms_of(model), tokens, model.device)
        self._side = SingleProcess(self._arena.cache, self._arena.groups, settings, name, self._facts, self._arena)
        self._lock = threading.Lock()
        self._offered: dict[str, list[int]] = {}
        self._ended: dict[str, Failure | None] = {}  # loads that a thread waits for
        self._left: dict[str, _Row] = {}  # loads for which none waits any more, and that have not ended
        self._requests = 0
        self._closed = False

    def __enter__(self) -> CacheExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(
        self,
        cache: Any,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str | None = None,
    ) -> str:
        """Offer a batch's KV to one other process; return the ticket by which it is fetched.

        Args:
            cache: What the model has computed: ``generate(..., return_dict_in_generate=True).past_key_values``.
            sequences: The ids that it was computed from, int [batch, tokens], and those generated after them, if any. The last
                id has no KV yet, or the side that fetches computes its KV again.
            attention_mask: The mask of the prompt, [batch, tokens]; needed if rows are padded (on the left).
            salt: Whatever else the KV depends on, such as a hash of images; the other side must give the same.

        Returns:
            A text to be carried unchanged. It is good for one ``fetch``, within ``lease`` seconds.

        Raises:
            ArgumentError: The arguments do not fit each other.
            UnsupportedCacheError: The cache is of a kind that is not supported, or has lost tokens that are needed.
            KvxferError: There is no room (kind ``OVERLOADED``), or the exchange is closed.
        """
        ids = token_ids("sequences", sequences)
        pads = padding(attention_mask, ids)
        forms = self._arena.forms
        present = held(cache, forms)
        length = min(present, ids.shape[1] - 1)
        if present > ids.shape[1]:
            raise ArgumentError(f"sequences must have the ids of all {present} tokens in the cache, not {ids.shape[1]}")
        rows = len(cache.layers[forms[0].index].keys)
        if rows != len(ids):
            raise ArgumentError(f"sequences must have a row for each of the {rows} rows of the cache, not {len(ids)}")
        contents = [
            [[_last(x, form, length - pad, present - length) for x in kept(cache, form, row)] for form in forms]
            for row, pad in enumerate(pads)
        ]
        prompts = [ids[row, pad:length].tolist() for row, pad in enumerate(pads)]
        digests = prompt_digests(self._model, self._facts, prompts, salt)
        with self._lock:
            self._turn()
            blocks = self._take(max(0, length - pad) for pad in pads)
            try:
                for row, pad in enumerate(pads):
                    if length > pad:
                        self._store(contents[row], blocks[row], length - pad)
            except BaseException:  # a device without memory, or a user who interrupts
                for taken in blocks:
                    self._arena.give_back(taken)
                raise
            tickets: list[Ticket | None] = []
            for row, pad in enumerate(pads):
                tokens = length - pad
                if tokens <= 0:
                    tickets.append(None)
                    continue
                request, table = self._name("offer"), self._arena.table(blocks[row], tokens)
                scheduler = self._side.scheduler
                scheduler.offer(request, self._side.mint(), digests[row], tokens)
                tickets.append(scheduler.ticket(request))
                scheduler.runs(request, 0, tokens, table)
                scheduler.finished(request, table, complete=True)
                self._offered[request] = blocks[row]
            self._turn()
        tail = tuple(tuple(map(int, row)) for row in ids[:, length:].tolist())
        return BatchTicket(tuple(tickets), length, tail).text

    def fetch(
        self,
        ticket: str,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        cache: Any = None,
        salt: str | None = None,
    ) -> dict[str, Any]:
        """Fetch what a ticket names, and return what ``generate()`` needs to continue: ``model.generate(**fetched)``.

        Blocks for at most ``start_timeout`` plus ``transfer_timeout`` seconds, and until the memory is quiet.

        Args:
            ticket: What ``offer`` returned in the other process.
            input_ids: The same prompt as on the other side, int [batch, tokens]. It may go on behind the ids that the other side has
                generated, as the next turn of a conversation does.
            attention_mask: The same as on the other side.
            cache: An empty cache of this model to fill, such as a ``StaticCache``; by default a new ``DynamicCache``.
            salt: The same as on the other side.

        Returns:
            ``input_ids``, in which the ids that the other side has generated follow the prompt, and those with which it goes on follow
            these; ``attention_mask``; and ``past_key_values``.

        Raises:
            ArgumentError: The ticket or the prompt is invalid, or they do not fit each other.
            UnsupportedCacheError: ``cache`` is of a kind that cannot be filled.
            KvxferError: The KV has not come; ``kind`` says why. Nothing is held any more; compute the prompt here.
        """
        told = BatchTicket.read(ticket)
        ids = token_ids("input_ids", input_ids)
        pads = padding(attention_mask, ids)
        self._check(told, ids, pads)
        target = DynamicCache(config=self._model.config) if cache is None else cache
        _check_empty(target, told.tokens)
        told_ids = torch.cat([ids[:, : told.tokens], torch.tensor(told.tail)], 1)
        full = ids if ids.shape[1] > told_ids.shape[1] else told_ids
        prompts = [ids[row, pad : told.tokens].tolist() for row, pad in enumerate(pads)]
        digests = prompt_digests(self._model, self._facts, prompts, salt)
        rows: list[_Row | None] = []
        with self._lock:
            self._turn()
            room = iter(self._take(max(0, told.tokens - pad) for pad in pads))
            for pad, row_ticket, content in zip(pads, told.rows, digests, strict=True):
                blocks = next(room)
                if row_ticket is None:
                    rows.append(None)
                    continue
                tokens = told.tokens - pad
                request, scheduler = self._name("fetch"), self._side.scheduler
                found = _Row(request, blocks, tokens)
                taken = scheduler.load(request, row_ticket.transfer, content, row_ticket.source, tokens, offered=True)
                if taken and scheduler.loadable(request, 0) == tokens:
                    scheduler.allocated(request, self._arena.table(blocks, tokens), tokens)
                else:
                    detail = "this exchange is fetching it already, or has just done so; each ticket serves one fetch"
                    self._ended[request] = Failure(FailureKind.MISUSE, detail)
                rows.append(found)
            self._turn()
        moved = [row for row in rows if row is not None]
        try:
            failure = self._wait(moved)
            if failure is not None:
                raise KvxferError(f"the KV of a prompt has not come: {failure}", kind=failure.kind)
            self._fill(target, rows, pads, told.tokens)
        finally:
            with self._lock:
                for done in moved:
                    if done.request in self._ended:
                        del self._ended[done.request]
                        self._give_back(done)
                    else:  # interrupted, and something may still be written there
                        self._left[done.request] = done
                        self._side.scheduler.preempted(done.request)
                self._turn()
        device = self._model.device
        mask = torch.ones_like(full)
        for row, pad in enumerate(pads):
            mask[row, :pad] = 0
        return {"input_ids": full.to(device), "attention_mask": mask.to(device), "past_key_values": target}

    def close(self) -> None:
        """Give up all offers and fetches, and close the back end. May be called more than once."""
        with self._lock:
            self._closed = True
            self._side.close()

    @property
    def room(self) -> int:
        """The number of free blocks of ``kvxfer_transformers.arena.BLOCK`` tokens; a row takes whole blocks."""
        with self._lock:
            self._turn()
            return self._arena.room()

    @property
    def received(self) -> int:
        """The number of bytes fetched so far."""
        return self._side.received

    def _check(self, told: BatchTicket, ids: torch.Tensor, pads: Iterable[int]) -> None:
        """Refuse a prompt that is not the ticket's, as far as the ticket shows."""
        if len(ids) != len(told.rows):
            raise ArgumentError(f"input_ids must have the {len(told.rows)} rows of the ticket's batch, not {len(ids)}")
        if ids.shape[1] < told.tokens:
            raise ArgumentError(
                f"input_ids must have the {told.tokens} tokens whose KV was offered, not {ids.shape[1]}; if the other side "
                "has generated more than one token, pass its sequences"
            )
        for row, pad in enumerate(pads):
            if (told.tokens - pad <= 0) != (told.rows[row] is None):
                raise ArgumentError(f"attention_mask must be as the other side had it: row {row} is padded differently")
            behind, tail = ids[row, told.tokens :].tolist(), list(told.tail[row])
            both = min(len(behind), len(tail))
            if behind[:both] != tail[:both]:
                raise ArgumentError(
                    f"input_ids must begin with the ids that were offered: row {row} has other ids behind the first {told.tokens}"
                )

    def _store(self, contents: list[list[torch.Tensor]], blocks: list[int], tokens: int) -> None:
        """Copy what a row of ``tokens`` tokens keeps, keys and values of each layer, into its blocks."""
        for form, sides in zip(self._arena.forms, contents, strict=True):
            for side, content in enumerate(sides):
                self._arena.store(form.index, side, blocks, tokens, content)

    def _name(self, what: str) -> str:
        self._requests += 1
        return f"{what}-{self._requests}"

    def _take(self, tokens: Iterable[int]) -> list[list[int]]:
        """Take blocks for each row, or for none."""
        taken: list[list[int]] = []
        wanted = list(tokens)
        for count in wanted:
            blocks = self._arena.take(count)
            if blocks is None:
                for earlier in taken:
                    self._arena.give_back(earlier)
                raise KvxferError(
                    f"there is no room for {sum(wanted)} tokens beside what is offered and not fetched yet: fetch that, wait "
                    "for its lease to end, or give the exchange more 'tokens'",
                    kind=FailureKind.OVERLOADED,
                )
            taken.append(blocks)
        return taken

    def _turn(self) -> None:
        """Carry out what was asked for, and handle what has ended; the lock must be held."""
        if self._closed:
            raise KvxferError("the exchange is closed")
        update = self._side.turn()
        for request in update.free:
            self._arena.give_back(self._offered.pop(request))
        for request, failure in {**dict.fromkeys(update.loaded), **update.failed}.items():
            left = self._left.pop(request, None)
            if left is None:
                self._ended[request] = failure
            else:
                self._give_back(left)

    def _give_back(self, row: _Row) -> None:
        """Free the memory of a row that has ended, into which nothing is written any more."""
        self._side.scheduler.finished(row.request, self._arena.table(row.blocks, row.tokens), True)
        self._arena.give_back(row.blocks)

    def _wait(self, rows: list[_Row]) -> Failure | None:
        """Wait until all rows have come or have failed; return the first failure, if there is one."""
        cause: Failure | None = None  # the failure of the first row that failed; the others are cancelled because of it
        until = time.monotonic() + self._config.longest + self._config.peer_timeout + GRACE_S
        while time.monotonic() < until:
            with self._lock:
                self._turn()
                ended = {row.request: self._ended[row.request] for row in rows if row.request in self._ended}
                cause = cause or next((failure for failure in ended.values() if failure is not None), None)
                if len(ended) == len(rows):
                    return cause
                if cause:  # the other rows are useless now
                    for row in rows:
                        if row.request not in ended:
                            self._side.scheduler.preempted(row.request)
                    self._turn()
            select.select([self._side.worker], [], [], LOOK_S)
        return Failure(FailureKind.BACKEND_FAILED, "neither the KV nor a failure has come")

    def _fill(self, target: Any, rows: list[_Row | None], pads: Iterable[int], tokens: int) -> None:
        """Write what has come into a cache, through the cache's own methods."""
        device = self._model.device
        for form in self._arena.forms if tokens else ():
            sides = []
            for side in (0, 1):
                shape = (len(rows), form.heads[side], tokens, form.dims[side])
                whole = torch.zeros(shape, dtype=form.dtype, device=device)
                for i, (row, pad) in enumerate(zip(rows, pads, strict=True)):
                    if row is not None:
                        first = max(0, row.tokens - form.window + 1) if form.window else 0
                        whole[i, :, pad + first :] = self._arena.load(form.index, side, row.blocks, first, row.tokens)
                sides.append(whole)
            target.update(*sides, form.index)
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()  # the blocks may be reused from now on


def _last(content: torch.Tensor, form: Any, tokens: int, dropped: int) -> torch.Tensor:
    """Return what the next token needs of a layer's [head, token, dim] for a row of ``tokens`` tokens.

    The side that fetches computes the last ``dropped`` tokens again.
    """
    wanted = min(tokens, form.window - 1) if form.window else tokens
    there = content.shape[1] - dropped
    if there < wanted:
        raise UnsupportedCacheError(
            f"layer {form.index} has dropped tokens that are needed to compute the last one again: have generate() "
            "make one token with return_dict_in_generate=True, and offer its past_key_values with its sequences"
        )
    return content[:, there - wanted : there] if wanted > 0 else content[:, :0]


def _check_empty(cache: Any, tokens: int) -> None:
    """Refuse a cache that cannot be filled with this number of tokens."""
    check_layers(cache)
    if any(layer.is_initialized and layer.get_seq_length() for layer in cache.layers):
        raise ArgumentError("cache must be empty: what is fetched begins with the first token")
    most = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer) and not layer.is_sliding]
    if most and min(most) <= tokens:
        raise ArgumentError(
            f"cache must have a max_cache_len above {tokens}, the tokens that are fetched, not {min(most)}"
        )
