"""Every kind of page in vLLM's caches, by the exact class of its spec: how it is kept, how it is laid out and how it may be cut.

The scheduler side and the worker side both use it, so that they never disagree about a group. A class that is not listed is opaque, even if
it is a subclass of one that is. What its pages hold is unknown, so they are moved whole. Which blocks it keeps is known only
from the manager that vLLM has registered for it. ``docs/models.md`` shows the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CATALOGUE", "Entry", "Kept", "entry_of"]

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
    """One kind of page. Only ``kept`` affects decisions; the rest is text for ``docs/models.md`` and for error messages.

    spec: The exact name of vLLM's class.
    page: What a page holds, in which order; ``source``: the files of vLLM that say so.
    cut: The axes along which it may be cut; ``depends``: what else its bytes depend on, and what its encoding therefore names.
    shown: The test that shows it.
    why: Why it is refused or stays local.
    """

    spec: str
    kept: Kept
    page: str
    source: str
    cut: str = ""
    depends: str = ""
    shown: str = ""
    why: str = ""


_ATTENTION = "[block, head, token, K then V], axes in any order"
_ATTENTION_SOURCE = "vllm/v1/attention/backends/flash_attn.py, flashinfer.py, triton_attn.py, flex_attention.py"
_ATTENTION_CUT = "head, token (not the tokens of CPU pages); nothing if the back end packs pages in its own way"
_ATTENTION_DEPENDS = "cache dtype and fp8 flavour; for packed pages also back end, and instruction set or device"
_LATENT = "[block, token, latent]; for a sparse indexer [block, all values, then all scales]"
_LATENT_SOURCE = "vllm/model_executor/layers/attention/mla_attention.py, vllm/v1/attention/backends/mla/indexer.py"
_LATENT_CUT = "token; nothing for a page with several tokens per row, or an indexer's other than fp8 in rows"
_LATENT_DEPENDS = (
    "cache dtype and fp8 flavour; for an indexer's also device, format of the scales; for whole pages also back end"
)
_TEST = "tests/vllm/test_pages.py"

CATALOGUE: dict[str, Entry] = {
    e.spec: e
    for e in (
        Entry("FullAttentionSpec", "full", _ATTENTION, _ATTENTION_SOURCE, _ATTENTION_CUT, _ATTENTION_DEPENDS, _TEST),
        Entry(
            "SinkFullAttentionSpec",
            "full",
            f"{_ATTENTION}; sinks are in blocks of their own, which belong to the engine",
            "vllm/model_executor/layers/attention/static_sink_attention.py",
            _ATTENTION_CUT,
            _ATTENTION_DEPENDS,
            _TEST,
        ),
        Entry(
            "RSWASpec",
            "full",
            f"{_ATTENTION}; all blocks of a prompt are kept, but only a window of generated tokens",
            "vllm/model_executor/layers/attention/rswa_attention.py",
            _ATTENTION_CUT,
            _ATTENTION_DEPENDS,
            _TEST,
        ),
        Entry("SlidingWindowSpec", "window", _ATTENTION, _ATTENTION_SOURCE, _ATTENTION_CUT, _ATTENTION_DEPENDS, _TEST),
        Entry(
            "ChunkedLocalAttentionSpec",
            "chunk",
            _ATTENTION,
            "vllm/model_executor/layers/attention/chunked_local_attention.py",
            _ATTENTION_CUT,
            _ATTENTION_DEPENDS,
            _TEST,
        ),
        Entry("MLAAttentionSpec", "full", _LATENT, _LATENT_SOURCE, _LATENT_CUT, _LATENT_DEPENDS, _TEST),
        Entry(
            "SlidingWindowMLASpec",
            "window",
            f"{_LATENT}; for a compressor the rows of its open group",
            "vllm/v1/attention/backends/mla/sparse_swa.py, vllm/models/deepseek_v4/compressor.py",
            _LATENT_CUT,
            _LATENT_DEPENDS,
            _TEST,
        ),
        Entry(
            "MambaSpec",
            "state",
            "[block, inputs of a convolution in either order, a matrix for each head]",
            "vllm/model_executor/layers/mamba/abstract.py, mamba_utils.py, and each layer's own file",
            "head and channel for layers of vLLM's own that are named below; nothing otherwise",
            "kind of layer, dtypes, sort of device; tensor-parallel size if nothing is cut",
            "tests/vllm/test_state_pages.py",
        ),
        Entry(
            "HiddenStateCacheSpec",
            "local",
            "[block, token, hidden states]",
            "vllm/model_executor/models/extract_hidden_states.py",
            shown=_TEST,
            why="hidden states are only for the client that asked this engine for them; no other engine computes with them",
        ),
        Entry(
            "HiSparseHotSpec",
            "local",
            "raw memory",
            "vllm/v1/hisparse/layout.py",
            shown=_TEST,
            why="a copy of what the group's source holds, which each engine makes for itself",
        ),
        Entry(
            "HiSparseResidentSpec",
            "local",
            "raw memory",
            "vllm/v1/hisparse/layout.py",
            shown=_TEST,
            why="a copy of what the group's source holds, which each engine makes for itself",
        ),
        Entry(
            "CircularBufferSpec",
            "ring",
            "[rows], that of a token at its position modulo their number: those that are not yet compressed, and drafts",
            "vllm/models/deepseek_v41/compressor.py, glm5next/common/attention.py, qwen4_exp/common/qsa_cache.py, "
            "step5/nvidia/csa_tail_ring.py",
            "nothing",
            "back end, device, number of rows; tensor-parallel size unless all ranks hold the same",
            "tests/vllm/test_rings.py",
        ),
        Entry(
            "KpoolTailSpec",
            "refused",
            "the rows of the pool that is still open",
            "vllm/v1/kv_cache_interface.py (0.30)",
            shown=_TEST,
            why="it holds only the rows left over from the last tokens, not one row per token",
        ),
        Entry(
            "CrossAttentionSpec",
            "refused",
            "[block, head, encoder's token, K then V]",
            "vllm/model_executor/layers/attention/cross_attention.py",
            shown=_TEST,
            why="an encoder's tokens are not the prompt's",
        ),
        Entry(
            "EncoderOnlyAttentionSpec",
            "refused",
            "nothing is kept",
            "vllm/v1/worker/gpu/model_states/encoder_only.py",
            shown=_TEST,
            why="such models keep no KV that a decoder could take over",
        ),
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
    name = type(spec).__name__
    kept = _MANAGERS.get(_manager(spec), "refused")
    return Entry(name, kept, "not known", "", why="kvxfer does not know how its blocks are kept")


def _manager(spec: Any) -> str:
    """Return the name of the class that vLLM has registered to manage such blocks; empty if there is none."""
    try:
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

        return getattr(KVCacheSpecRegistry.get_manager_class(spec), "__name__", "")
    except Exception:  # this release has no registry, or this is no spec at all
        return ""
