"""The pool of blocks, with the prefix cache."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any


class Pool:
    """Blocks with reference counts. Free ones keep the prefix that they hold until they are taken."""

    def __init__(self, blocks: int) -> None:
        self.refs, self.unused = Counter[int](), OrderedDict.fromkeys(range(blocks))
        self.prefixes: dict[tuple[int, ...], int] = {}

    def take(self) -> int:
        block, _ = self.unused.popitem(last=False)
        self.prefixes = {prefix: b for prefix, b in self.prefixes.items() if b != block}
        self.refs[block] = 1
        return block

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            self.unused.pop(block, None)
            self.refs[block] += 1

    def free(self, blocks: Any) -> None:
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.unused[block] = None

    def used(self) -> int:
        return self.refs.total()
