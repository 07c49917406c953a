"""Every kind of page in vLLM's caches, by the exact class of its spec: which of its blocks are kept, or why none is.

The scheduler side and the worker side both use it, so that they never disagree about a group. A class that is not listed is opaque, even if
it is a subclass of one that is. What its pages hold is unknown, so they are moved whole. Which blocks it keeps is known only
from the manager that vLLM has registered for it. ``docs/models.md`` shows the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kept = Literal["full", "window", "chunk", "state", "ring", "local", "refused"]
"""Which blocks a group keeps.

* ``full``: all blocks of a request.
* ``window``: those that the last tokens attend to.
* ``chunk``: those of the chunk that the last token is in.
* ``state``: the one with the state after the last token.
* ``ring``: the only one of a request. The next tokens overwrite its rows one after the other, so it is a state, too.
* ``local``: only blocks that no other engine needs.
* ``refused``: not supported, for the reason in ``Entry.why``.
"""


@dataclass(frozen=True)
class Entry:
    """One kind of page; ``docs/models_table.py`` says of each what it holds."""

    spec: str  # the exact name of vLLM's class
    kept: Kept
    why: str = ""  # it is refused, or stays local


CATALOGUE: dict[str, Entry] = {
    e.spec: e
    for e in (
        Entry("FullAttentionSpec", "full"),
        Entry("SinkFullAttentionSpec", "full"),
        Entry("RSWASpec", "full"),
        Entry("SlidingWindowSpec", "window"),
        Entry("ChunkedLocalAttentionSpec", "chunk"),
        Entry("MLAAttentionSpec", "full"),
        Entry("SlidingWindowMLASpec", "window"),
        Entry("MambaSpec", "state"),
        Entry(
            "HiddenStateCacheSpec",
            "local",
            "hidden states are only for the client that asked this engine for them; no other engine computes with them",
        ),
        Entry(
            "HiSparseHotSpec", "local", "a copy of what the group's source holds, which each engine makes for itself"
        ),
        Entry(
            "HiSparseResidentSpec",
            "local",
            "a copy of what the group's source holds, which each engine makes for itself",
        ),
        Entry("CircularBufferSpec", "ring"),
        Entry(
            "KpoolTailSpec", "refused", "it holds only the rows left over from the last tokens, not one row per token"
        ),
        Entry("CrossAttentionSpec", "refused", "an encoder's tokens are not the prompt's"),
        Entry("EncoderOnlyAttentionSpec", "refused", "such models keep no KV that a decoder could take over"),
    )
}

_MANAGERS: dict[str, Kept] = {"FullAttentionManager": "full", "SlidingWindowManager": "window"}


def entry_of(spec: Any) -> Entry:
    """Return a spec's entry, by its exact class.

    For a class that is not listed, the entry says only which blocks its manager keeps.

    Never raises: what cannot be moved is ``refused``, and ``groups_of`` turns that into an error that names it.
    """
    known = CATALOGUE.get(type(spec).__name__)
    if known is not None and type(spec).__module__.startswith("vllm."):
        return known
    from kvxfer_vllm.internals import manager_of

    name = type(spec).__name__
    kept = _MANAGERS.get(manager_of(spec), "refused")
    return Entry(name, kept, "kvxfer does not know how its blocks are kept")
