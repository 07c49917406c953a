"""What SGLang calls states: memory of a pool beside the KV of full attention, each kind with indices of its own.

SGLang describes a state's buffers as it does those of KV, and says with the last chunk which of their items are a request's.
Both servers list the same items in the same order, beginning behind what decode has cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer import KvxferError
from kvxfer.values import MAX_TOKENS, NULL, Group

SWA, MAMBA, DSA = "swa", "mamba", "dsa"
"""Pages of sliding-window layers; the recurrent state of a request; the keys of sparse attention's index, page by page."""

PADDING = 0
"""A page that SGLang gives to no request. It is offered if only a state is to be moved, and nobody fetches it."""


@dataclass(frozen=True)
class PoolBuffer:
    """A buffer of a pool: its first byte in the flat offset space, its bytes, and those of a page or of another item of it."""

    start: int
    nbytes: int
    item: int


def tokens_of(pages: int, page: int) -> int:
    """Return for how many tokens a number of pages counts, on both sides; a state that moves without a page counts for one."""
    return pages * page or 1


def kind_of(state: Any) -> str:
    """Return SGLang's name of a kind of state."""
    return str(getattr(state, "value", state))


@dataclass(frozen=True)
class States:
    """The states of a pool, and how block tables list them."""

    kinds: tuple[str, ...]
    page: int

    @classmethod
    def of(cls, args: Any) -> States:
        """Return what SGLang's ``KVArgs`` say."""
        return cls(tuple(map(kind_of, args.state_types)), args.page_size)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of a block table: that of full attention, then one for each state that does not have the same pages.

        SGLang does not say how long a window is, but lists its pages. So each page that decode lists is needed.
        """
        own = {SWA: Group(self.page, "window", MAX_TOKENS), MAMBA: Group(MAX_TOKENS, "state")}
        return (Group(self.page), *(own[kind] for kind in self.kinds if kind in own))

    def group(self, kind: str) -> int:
        """Return the index of a kind's group."""
        return 1 + [k for k in self.kinds if k != DSA].index(kind) if kind != DSA else 0

    def rows(self, pages: Sequence[int], indices: Sequence[Any] | None) -> list[list[int]]:
        """Return the rows of a block table.

        Raises:
            KvxferError: They are not what SGLang 0.5.23 lists.
        """
        if indices is None:
            return [list(pages)] + [[] for _ in self.groups[1:]]
        if len(indices) != len(self.kinds):
            raise KvxferError(f"SGLang has listed {len(indices)} states for a pool that has {len(self.kinds)}")
        rows = [list(pages)]
        for kind, listed in zip(self.kinds, indices, strict=True):
            ids = [] if listed is None else np.asarray(listed).ravel().tolist()
            if kind == DSA:
                if ids != rows[0]:
                    raise KvxferError(f"SGLang has listed {len(ids)} pages of the index, which are not those of the KV")
            elif kind == SWA:
                if len(ids) > len(pages):
                    raise KvxferError(f"SGLang has listed {len(ids)} pages of the window for {len(pages)} pages")
                rows.append([NULL] * (len(pages) - len(ids)) + ids)
            elif len(ids) != 1:
                raise KvxferError(f"SGLang has listed {len(ids)} recurrent states of a request")
            else:
                rows.append(ids)
        return rows
