"""A pool of blocks for an engine that has none of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError

MAX_BLOCKS = 1 << 31
MAX_SALT = 1 << 20


class PrefixPool:
    """A ``BlockPool`` with a prefix cache: blocks are found again by the tokens in them and all tokens before.

    A block without references keeps its content until it is taken again; the one that was freed first is taken first. One
    thread.

    It serves one group of kind ``full``, whose tables have a block at each position. Windows, states and several groups need
    a pool of the engine's own, which knows which of their blocks are useful without earlier ones, or together. A table
    with a ``NULL`` is refused.

    Args:
        blocks: How many blocks there are; their ids are 0 to ``blocks - 1``.
        block_tokens: Tokens in each block.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._references = [0] * arguments.integer("blocks", blocks, 1, MAX_BLOCKS)
        self._block_tokens = arguments.integer("block_tokens", block_tokens, 1, MAX_BLOCKS)
        self._unused = dict.fromkeys(range(blocks))  # in the order in which they are taken
        self._holders: dict[bytes, int] = {}  # by prefix
        self._held: dict[int, bytes] = {}  # the prefix, by block

    def grow(self, table: list[int], tokens: int) -> bool:
        """Append unused blocks, each with one reference, to a table until it has blocks for all ``tokens``.

        Returns:
            False if too few blocks are unused; then nothing is added.

        Raises:
            ArgumentError: The table is not a list of blocks of this pool, or ``tokens`` is not a count.
        """
        self._known("table", arguments.instance("table", table, list))
        missing = -(-arguments.integer("tokens", tokens, 0) // self._block_tokens) - len(table)
        if missing > len(self._unused):
            return False
        taken = list(islice(self._unused, max(missing, 0)))
        for block in taken:
            if prefix := self._held.pop(block, None):
                del self._holders[prefix]
        self.touch(taken)
        table += taken
        return True

    def prefix(self, tokens: Sequence[int], salt: bytes = b"") -> list[int]:
        """Return the blocks that hold the longest cached prefix of these tokens, each with one more reference.

        Args:
            tokens: Token ids. Only whole blocks of them are looked for; leave out the last token if it is to be computed.
            salt: What else the KV depends on, such as an adapter.

        Raises:
            ArgumentError: An argument has the wrong type.
        """
        found = []
        for prefix in self._prefixes(tokens, salt):
            block = self._holders.get(prefix)
            if block is None:
                break
            found.append(block)
        self.touch(found)
        return found

    def remember(self, tokens: Sequence[int], table: Sequence[int], salt: bytes = b"") -> None:
        """Record which tokens the blocks of a table hold, so that ``prefix`` finds those that are full. They must be in use.

        Raises:
            ArgumentError: The table has an id that is not of this pool, or an argument has the wrong type.
        """
        self._known("table", table)
        for prefix, block in zip(self._prefixes(tokens, salt), table, strict=False):
            if prefix not in self._holders and block not in self._held:
                self._holders[prefix], self._held[block] = block, prefix

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks.

        Raises:
            ArgumentError: One is not a block of this pool; nothing is done.
        """
        self._known("blocks", blocks)
        for block in blocks:
            self._unused.pop(block, None)
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. Blocks without references are taken again in this order, after all that are unused now.

        Raises:
            ArgumentError: One is not a block of this pool, and nothing is done; or one has no reference, and those before it are
                freed.
        """
        self._known("blocks", blocks)
        for block in blocks:
            if not self._references[block]:
                raise ArgumentError(f"blocks must be in use, and block {block} is not")
            self._references[block] -= 1
            if not self._references[block]:
                self._unused[block] = None

    def used(self) -> int:
        """Return how many blocks have a reference."""
        return len(self._references) - len(self._unused)

    def _known(self, name: str, blocks: Sequence[int]) -> None:
        """Refuse ids that are not of this pool; as an index, -1 would silently mean the last block."""
        count = len(self._references)
        wrong = next((block for block in blocks if not 0 <= block < count), None)
        if wrong is not None:
            raise ArgumentError(
                f"{name} must have ids from 0 to {count - 1}, not {wrong}: this pool is for groups of kind 'full', which have a block "
                "at each position"
            )

    def _prefixes(self, tokens: Sequence[int], salt: bytes) -> Iterator[bytes]:
        """Yield a hash of each prefix of whole blocks, the shortest first."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ArgumentError(f"tokens must be a row of integers, not {ids.dtype} of shape {ids.shape}")
        whole = len(ids) // self._block_tokens
        name = _digest(arguments.bytes_of("salt", salt, MAX_SALT, empty=True))
        for block in ids[: whole * self._block_tokens].astype("<i8").reshape(whole, self._block_tokens):
            name = _digest(name + block.tobytes())
            yield name


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
