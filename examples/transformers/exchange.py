"""Moves what ``model.generate`` keeps in its cache from one process to another."""

import hashlib
import inspect
from collections import Counter

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvxfer import (
    Agent,
    BlockTable,
    Cache,
    Config,
    Directory,
    Ended,
    KvxferError,
    Offer,
    Released,
    Ticket,
    TransferId,
    digest,
    sealed,
)

BLOCK, BLOCKS = 16, 256


class Exchange:
    """Offers prompts' KV to other processes, and fetches what they offer. One thread.

    A ``DynamicCache`` is new memory at each token, and peers read memory that stays in place. So each prompt has blocks here for as
    long as a transfer may touch them.
    """

    def __init__(self, model, name, config=None):
        self.model, config = model, Config() if config is None else config
        # What the model calls its cache, as an argument and in what it returns: transformers 5.24 has renamed it.
        self.argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.facts = {"weights": _fingerprint(model), "dtype": str(model.dtype)}
        planes = {"k": [], "v": []}  # by layer, [block, token, head, dim]
        for layer in self._layers_of_one_token():
            for plane, one in zip(planes.values(), (layer.keys, layer.values), strict=True):
                plane.append(
                    torch.zeros((BLOCKS, BLOCK, one.shape[1], one.shape[3]), dtype=one.dtype, device=one.device)
                )
        self.layers = list(zip(planes["k"], planes["v"], strict=True))
        self.free, self.held, self.outcomes = list(range(BLOCKS)), {}, {}
        self.made = Counter()
        self.agent = Agent(Cache.of_tensors(planes, "block token head unit"), config, name, self.facts)
        self.directory = Directory(config, name, self.facts)
        self.directory.publish((self.agent.descriptor,))

    def _layers_of_one_token(self):
        with torch.no_grad():
            made = self.model(torch.zeros((1, 1), dtype=torch.long, device=self.model.device), use_cache=True)
        layers = made[self.argument].layers
        for layer in layers:
            if type(layer) is not DynamicLayer:
                raise ValueError(f"a {type(layer).__name__} is not moved: this example moves full attention only")
        return layers

    def offer(self, cache, ids):
        """Offer the KV of a prompt, ``ids`` [tokens], and return the ticket by which one other process fetches it."""
        blocks = self._take(len(ids))
        at = self._slots(blocks, len(ids))
        for (keys, values), layer in zip(self.layers, cache.layers, strict=True):
            keys[at], values[at] = (x[0, :, : len(ids)].transpose(0, 1) for x in (layer.keys, layer.values))
        self.made["offers"] += 1
        transfer = TransferId.mint(self.directory.epoch, f"prompt-{self.made['offers']}")
        self.held[transfer] = blocks
        self.agent.offer(Offer(transfer, self._digest(ids), 1, len(ids), BlockTable.of([blocks]), final=True))
        return Ticket(transfer, self._digest(ids), self.directory.source).text

    def fetch(self, ticket, ids):
        """Return a cache with the KV of a prompt, ``ids`` [tokens], which another process has offered.

        Raises:
            KvxferError: It has not come; ``kind`` says why. Compute the prompt here.
        """
        blocks = self._take(len(ids))
        self.made["fetches"] += 1
        handle, told = f"fetch-{self.made['fetches']}", Ticket.read(ticket)
        named = Ticket(
            told.transfer, self._digest(ids), told.source
        )  # our own digest: a ticket for another prompt is refused
        self.held[handle] = blocks
        self.agent.fetch(named.fetch(handle, BlockTable.of([blocks]), start=0, tokens=len(ids), offered=True))
        while handle not in self.outcomes:
            self._listen()
        outcome = self.outcomes.pop(handle)
        if not outcome.delivered:
            raise KvxferError(f"the KV of a prompt has not come: {outcome.failure}", kind=outcome.kind)
        cache, at = DynamicCache(config=self.model.config), self._slots(blocks, len(ids))
        for index, planes in enumerate(self.layers):
            cache.update(*(plane[at].transpose(0, 1)[None].clone() for plane in planes), index)
        while handle in self.held:
            self._listen()
        return cache

    def serve(self):
        """Return once nobody needs what is offered: it has been fetched, or its lease has ended."""
        while self.held:
            self._listen()

    def close(self):
        self.agent.close()
        self.directory.close()

    def _listen(self):
        for event in self.agent.events(timeout=1.0):
            name = event.handle if event.role == "consumer" else event.transfer
            if isinstance(event, Ended) and event.role == "consumer":
                self.outcomes[name] = event.outcome
            elif isinstance(event, Released):  # nothing touches its blocks any more
                self.free += self.held.pop(name)

    def _take(self, tokens):
        blocks, self.free = self.free[: -(-tokens // BLOCK)], self.free[-(-tokens // BLOCK) :]
        if len(blocks) * BLOCK < tokens:
            self.free += blocks
            raise KvxferError(f"there is no room for {tokens} tokens: fetch what is offered first")
        return blocks

    def _slots(self, blocks, tokens):
        at = torch.arange(tokens)
        return torch.tensor(blocks)[at // BLOCK], at % BLOCK

    def _digest(self, ids):
        return digest(tokens=ids.tolist(), model=sealed(self.facts))


def _fingerprint(model):
    """Return what tells apart models with other weights, whatever their names are."""
    told = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(model.state_dict().items()):
        told.update(name.encode() + weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()
