"""Every kind of page that vLLM's caches have, by the exact class of its spec: how it is kept, laid out and may be cut.

Both halves ask here, so that a scheduler never takes for a window what its workers take for something else. A class that
is not here, a subclass of one that is included, is opaque: nothing is known of what its pages hold, so they are moved
whole; and how its blocks are kept, only the manager says that vLLM has registered for it. ``docs/models.md`` shows the
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CATALOGUE", "Entry", "Kept", "entry_of"]

Kept = Literal["full", "window", "chunk", "state", "local", "refused"]
"""How a group keeps blocks. ``full``: all of a request; ``window``: those that the last tokens attend to; ``chunk``: those
of the tokens' own chunk; ``state``: the one with the state after the last token; ``local``: nothing that another engine
needs; ``refused``: not supported, and ``Entry.why`` says why."""


@dataclass(frozen=True)
class Entry:
    """One kind of page. The words are for ``docs/models.md``; decisions hang on ``kept``, ``headed`` and ``writers`` only.

    spec: the exact name of vLLM's class.
    page: what a page holds, in which order; ``source``: the file of vLLM that says so.
    cut: along which axes it may be cut; ``depends``: what else its bytes depend on, and so its encoding names.
    shown: the test that shows it.
    why: for what is refused or stays local: why.
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
_ATTENTION_CUT = "head, token; not the tokens of CPU pages; nothing where the back end packs a page its own way"
_ATTENTION_DEPENDS = "cache dtype and its fp8 flavour; packed pages: back end, instruction set or device"
_LATENT = "[block, token, latent]; of a sparse indexer: [block, all values, then all scales]"
_LATENT_SOURCE = "vllm/model_executor/layers/attention/mla_attention.py, vllm/v1/attention/backends/mla/indexer.py"
_LATENT_CUT = "token; an indexer's page, and one with several tokens a row: nothing"
_LATENT_DEPENDS = "cache dtype and its fp8 flavour; whole pages: back end, device, format of the scales"
_TEST = "tests/vllm/test_pages.py"

CATALOGUE: dict[str, Entry] = {
    e.spec: e
    for e in (
        Entry("FullAttentionSpec", "full", _ATTENTION, _ATTENTION_SOURCE, _ATTENTION_CUT, _ATTENTION_DEPENDS, _TEST),
        Entry(
            "SinkFullAttentionSpec",
            "full",
            f"{_ATTENTION}; sinks lie in blocks of the engine's own",
            "vllm/model_executor/layers/attention/static_sink_attention.py",
            _ATTENTION_CUT,
            _ATTENTION_DEPENDS,
            _TEST,
        ),
        Entry(
            "RSWASpec",
            "full",
            f"{_ATTENTION}; a prompt's blocks are all kept, generated tokens in a window",
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
            f"{_LATENT}; of a compressor: rows of its open group",
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
            "head, channel of a short convolution or of Mamba 2; else nothing between other tensor parallel sizes",
            "kind of layer, dtypes, sort of device; tensor parallel size where nothing is cut",
            "tests/vllm/test_state_pages.py",
        ),
        Entry(
            "HiddenStateCacheSpec",
            "local",
            "[block, token, hidden states]",
            "vllm/model_executor/models/extract_hidden_states.py",
            shown=_TEST,
            why="hidden states are for whoever asked this engine for them; no other computes with them",
        ),
        Entry(
            "HiSparseHotSpec",
            "local",
            "raw memory",
            "vllm/v1/hisparse/layout.py",
            shown=_TEST,
            why="a copy of what the group's source holds, made anew by each engine",
        ),
        Entry(
            "HiSparseResidentSpec",
            "local",
            "raw memory",
            "vllm/v1/hisparse/layout.py",
            shown=_TEST,
            why="a copy of what the group's source holds, made anew by each engine",
        ),
        Entry(
            "CircularBufferSpec",
            "refused",
            "a ring of the rows that are not yet compressed, one block a request",
            "vllm/models/deepseek_v41/compressor.py, vllm/models/qwen4_exp/common/qsa_cache.py",
            shown=_TEST,
            why="a ring has no place for a token by its position",
        ),
        Entry(
            "KpoolTailSpec",
            "refused",
            "the rows of the pool that is still open",
            "vllm/v1/kv_cache_interface.py (0.30)",
            shown=_TEST,
            why="it holds what its last tokens left, not a row a token",
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

    One that nobody knows is as opaque as can be, and kept as its manager keeps it.

    Never raises: what cannot be moved is ``refused``, which ``groups_of`` turns into an error that names it.
    """
    known = CATALOGUE.get(type(spec).__name__)
    if known is not None and type(spec).__module__.startswith("vllm."):
        return known
    name = type(spec).__name__
    kept = _MANAGERS.get(_manager(spec), "refused")
    return Entry(name, kept, "not known", "", why="kvxfer does not know how its blocks are kept")


def _manager(spec: Any) -> str:
    """Return the class that vLLM has registered for keeping such blocks."""
    try:
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

        return getattr(KVCacheSpecRegistry.get_manager_class(spec), "__name__", "")
    except Exception:  # no registry in this release, or not for what is no spec at all
        return ""
