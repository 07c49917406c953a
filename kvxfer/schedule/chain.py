"""Name a prefix of a prompt by its content, so that two engines find what they have in common, whatever their blocks and hashes are.

A *chain* has a digest after every ``STEP`` tokens. Each covers the one before it, the tokens since, and the media that begin
among them. At its root are the facts, the adapter and the salt (``kvxfer.identity.digest`` of no tokens). So two chains agree up
to the last link before the first difference, and nobody finds what was computed under a salt or an adapter without stating it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.identity import as_token_ids, digest, key, media_items, token_row

if TYPE_CHECKING:
    from numpy.typing import NDArray  # for annotations alone it takes too long to load

STEP = 16
"""Tokens from one digest to the next: the size of an engine's usual block."""
DIGEST = 16
"""Bytes of a digest."""
MAX_LINKS = 4096
"""The most links of a chain as it is sent, which then has 64 KiB. Where it would have more, only every second one is sent, or every
fourth, and so on: 64k tokens are compared to 16 tokens, 128k to 32."""


class Chain(msgspec.Struct, frozen=True, gc=False):
    """Digests of the first tokens of a prompt: one after each ``step`` tokens.

    Attributes:
        step: Tokens from one to the next: ``STEP``, or a power of two times that.
        links: The digests, one behind the other.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    step: int
    links: Annotated[bytes, Meta(max_length=MAX_LINKS * DIGEST)]

    def __post_init__(self) -> None:
        arguments.bytes_of("links", self.links, MAX_LINKS * DIGEST, empty=True)
        step = arguments.integer("step", self.step, STEP, STEP << 32)
        if step % STEP or (step // STEP) & (step // STEP - 1):
            raise ArgumentError(f"step must be {STEP} times a power of two, not {step}")
        if len(self.links) % DIGEST:
            raise ArgumentError(f"links must be digests of {DIGEST} bytes, not {len(self.links)} bytes")

    def __len__(self) -> int:
        """Return how many links there are."""
        return len(self.links) // DIGEST

    @property
    def tokens(self) -> int:
        """How many tokens it covers."""
        return len(self) * self.step

    def floor(self, tokens: int) -> int:
        """Return the most tokens, up to ``tokens``, behind which there is a link."""
        return min(max(tokens, 0) // self.step * self.step, self.tokens)

    def digest(self, tokens: int) -> bytes:
        """Return the digest of the first ``tokens`` tokens; empty if there is no link behind them."""
        if tokens <= 0 or tokens > self.tokens or tokens % self.step:
            return b""
        end = tokens // self.step * DIGEST
        return self.links[end - DIGEST : end]

    def until(self, tokens: int) -> Chain:
        """Return the chain of the first ``tokens`` tokens, or of those before them that it has a link behind."""
        return Chain(self.step, self.links[: self.floor(tokens) // self.step * DIGEST])


class Prefix:
    """The tokens of a prompt, or of a prompt with its answer, and all else that their KV depends on.

    Nothing is hashed before a digest or a chain is asked for. An array of tokens must not be changed until then.

    Args:
        tokens: The ids of the tokens.
        model: The model's identity, as in ``kvxfer.identity.digest``: most often ``sealed(facts)``.
        media: For each multimodal item a hash of what its encoder gets, first position and length in tokens, in order.
        lora: A hash of the adapter's weights and scaling.
        salt: The request's cache salt.
        embeds: A hash of all embeddings that stand in place of tokens.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    __slots__ = ("_ids", "_links", "_media", "_root", "_tokens")

    def __init__(
        self,
        tokens: Sequence[int] | NDArray[Any],
        *,
        model: str,
        media: Sequence[tuple[str, int, int]] = (),
        lora: str | int | None = None,
        salt: str | None = None,
        embeds: bytes | None = None,
    ) -> None:
        self._root = digest(tokens=(), model=model, lora=lora, salt=salt, embeds=embeds)
        self._media = media_items(media)
        self._ids: NDArray[Any] | None = token_row(tokens)
        self._tokens = len(self._ids)
        self._links: list[bytes] = []

    def __len__(self) -> int:
        """Return how many tokens there are."""
        return self._tokens

    @property
    def links(self) -> Sequence[bytes]:
        """The digests after every ``STEP`` tokens."""
        if self._ids is not None:
            self._links = self._hashed(self._ids)
            self._ids = None
        return self._links

    def digest(self, tokens: int) -> bytes:
        """Return the digest of the first ``tokens`` tokens, a multiple of ``STEP``; empty if there are fewer."""
        at = arguments.integer("tokens", tokens, 0) // STEP
        return self.links[at - 1] if tokens % STEP == 0 and 0 < at <= len(self.links) else b""

    def chain(self, tokens: int | None = None) -> Chain:
        """Return the chain of the first ``tokens`` tokens, with ``MAX_LINKS`` links at most; None: of all."""
        most = self._tokens if tokens is None else min(arguments.integer("tokens", tokens, 0), self._tokens)
        links, every = self.links[: most // STEP], 1
        while len(links) // every > MAX_LINKS:
            every *= 2
        return Chain(STEP * every, b"".join(links[every - 1 :: every]))

    def _hashed(self, tokens: NDArray[Any]) -> list[bytes]:
        steps = self._tokens // STEP
        ids = as_token_ids(tokens[: steps * STEP])
        begun = _by_step(self._media)
        # Each row begins with the number of items that begin in it, so that no tokens look like an item.
        rows = np.empty((steps, STEP + 1), "<i8")
        rows[:, 0], rows[:, 1:] = 0, ids.reshape(steps, STEP)
        for step, items in begun.items():
            if step < steps:
                rows[step, 0] = len(items)
        content, nbytes = rows.tobytes(), rows.itemsize * (STEP + 1)
        links, last, blake = [], self._root, hashlib.blake2b
        for step in range(steps):
            more = key(*begun[step]) if step in begun else b""
            last = blake(last + content[step * nbytes : (step + 1) * nbytes] + more, digest_size=DIGEST).digest()
            links.append(last)
        return links


def _by_step(media: tuple[tuple[str, int, int], ...]) -> dict[int, list[tuple[str, int, int]]]:
    """Return the items that begin in each step."""
    found: dict[int, list[tuple[str, int, int]]] = {}
    for item in media:
        found.setdefault(item[1] // STEP, []).append(item)
    return found
