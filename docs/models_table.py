"""Write the tables of ``docs/models.md``: ``python docs/models_table.py``.

The families of models stand here, with the kinds of pages that vLLM gives them. What is kept of a page, and which families are refused,
follows from the catalogue of page kinds. A test fails when the tables are not what the code says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvxfer_vllm.pages.catalogue import CATALOGUE
from kvxfer_vllm.pages.forms import WRITERS

PAGE = Path(__file__).with_name("models.md")

KEPT = {
    "full": "all blocks",
    "window": "the window's blocks",
    "chunk": "the chunk's blocks",
    "state": "the last state",
    "ring": "the request's only block",
    "local": "stays local",
    "refused": "refused",
}
FORMS = {
    "kv": "each head's token is its K, then its V",
    "latent": "each token is one row, the same on all ranks",
    "packed": "each head's tokens are one piece",
    "indexer": "all values, then all scales, a row of each for each token; the same on all ranks",
}
SHOWN = {"end to end": "end to end", "scheduler": "on the scheduler", "planner": "planner only"}

Shown = Literal["end to end", "scheduler", "planner"]
"""How far it is tested. ``end to end``: this architecture on real servers on CPUs, with tokens compared. ``scheduler``: groups
of the same kinds on vLLM's scheduler, with a simulated forward pass. ``planner``: its pages, copied from one engine's memory to
another's."""


@dataclass(frozen=True)
class Page:
    """What one kind of page holds.

    page: What it holds, in which order; ``source``: the files of vLLM that say so.
    cut: The axes along which it may be cut; ``depends``: what else its bytes depend on, and what its encoding therefore names.
    shown: The test that shows it.
    """

    page: str
    source: str
    cut: str
    depends: str
    shown: str


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

PAGES = {
    name: Page(*said)
    for name, *said in (
        ("FullAttentionSpec", _ATTENTION, _ATTENTION_SOURCE, _ATTENTION_CUT, _ATTENTION_DEPENDS, _TEST),
        (
            "SinkFullAttentionSpec",
            f"{_ATTENTION}; sinks are in blocks of their own, which belong to the engine",
            "vllm/model_executor/layers/attention/static_sink_attention.py",
            _ATTENTION_CUT,
            _ATTENTION_DEPENDS,
            _TEST,
        ),
        (
            "RSWASpec",
            f"{_ATTENTION}; all blocks of a prompt are kept, but only a window of generated tokens",
            "vllm/model_executor/layers/attention/rswa_attention.py",
            _ATTENTION_CUT,
            _ATTENTION_DEPENDS,
            _TEST,
        ),
        ("SlidingWindowSpec", _ATTENTION, _ATTENTION_SOURCE, _ATTENTION_CUT, _ATTENTION_DEPENDS, _TEST),
        (
            "ChunkedLocalAttentionSpec",
            _ATTENTION,
            "vllm/model_executor/layers/attention/chunked_local_attention.py",
            _ATTENTION_CUT,
            _ATTENTION_DEPENDS,
            _TEST,
        ),
        ("MLAAttentionSpec", _LATENT, _LATENT_SOURCE, _LATENT_CUT, _LATENT_DEPENDS, _TEST),
        (
            "SlidingWindowMLASpec",
            f"{_LATENT}; for a compressor the rows of its open group",
            "vllm/v1/attention/backends/mla/sparse_swa.py, vllm/models/deepseek_v4/compressor.py",
            _LATENT_CUT,
            _LATENT_DEPENDS,
            _TEST,
        ),
        (
            "MambaSpec",
            "[block, inputs of a convolution in either order, a matrix for each head]",
            "vllm/model_executor/layers/mamba/abstract.py, mamba_utils.py, and each layer's own file",
            "head and channel for layers of vLLM's own that are named below; nothing otherwise",
            "kind of layer, dtypes, sort of device; tensor-parallel size if nothing is cut",
            "tests/vllm/test_state_pages.py",
        ),
        (
            "HiddenStateCacheSpec",
            "[block, token, hidden states]",
            "vllm/model_executor/models/extract_hidden_states.py",
            "",
            "",
            _TEST,
        ),
        ("HiSparseHotSpec", "raw memory", "vllm/v1/hisparse/layout.py", "", "", _TEST),
        ("HiSparseResidentSpec", "raw memory", "vllm/v1/hisparse/layout.py", "", "", _TEST),
        (
            "CircularBufferSpec",
            "[rows], that of a token at its position modulo their number: those that are not yet compressed, and drafts",
            "vllm/models/deepseek_v41/compressor.py, glm5next/common/attention.py, qwen4_exp/common/qsa_cache.py, "
            "step5/nvidia/csa_tail_ring.py",
            "nothing",
            "back end, device, number of rows; tensor-parallel size unless all ranks hold the same",
            "tests/vllm/test_rings.py",
        ),
        (
            "KpoolTailSpec",
            "the rows of the pool that is still open",
            "vllm/v1/kv_cache_interface.py (0.30)",
            "",
            "",
            _TEST,
        ),
        (
            "CrossAttentionSpec",
            "[block, head, encoder's token, K then V]",
            "vllm/model_executor/layers/attention/cross_attention.py",
            "",
            "",
            _TEST,
        ),
        (
            "EncoderOnlyAttentionSpec",
            "nothing is kept",
            "vllm/v1/worker/gpu/model_states/encoder_only.py",
            "",
            "",
            _TEST,
        ),
    )
}
"""What the kinds of pages in the catalogue hold, by the class of their spec."""


@dataclass(frozen=True)
class Family:
    """Models that vLLM treats alike.

    name: What people call them; ``architectures``: their names in vLLM's registry.
    groups: What each of their KV-cache groups holds, and the class of its spec.
    shown, by: How far they are tested, and the test that goes furthest.
    note: What else to know, such as what must be equal on both sides.
    release: The last release of vLLM on which they were tested; 0.33 on the kernels of 0.32 for CPUs.
    """

    name: str
    architectures: tuple[str, ...]
    groups: tuple[tuple[str, str], ...]
    shown: Shown
    by: str
    note: str = ""
    release: str = "0.33"

    @property
    def refused(self) -> str:
        """Why it is refused, from the catalogue; empty if it is not."""
        for what, spec in self.groups:
            if CATALOGUE[spec].kept == "refused":
                return f"{what}: {CATALOGUE[spec].why}"
        return ""


_FULL = ("full attention", "FullAttentionSpec")
_WINDOW = ("sliding window", "SlidingWindowSpec")
_CHUNK = ("chunked local attention", "ChunkedLocalAttentionSpec")
_LATENT = ("MLA", "MLAAttentionSpec")
_INDEXER = ("sparse indexer", "MLAAttentionSpec")
_STATE = ("recurrent state", "MambaSpec")
_REPLAYED = ("window of MLA, replayed", "SlidingWindowMLASpec")
_RING = ("rows not yet compressed", "CircularBufferSpec")

_E2E_PAIR, _E2E_GROUPS = "tests/e2e/test_pair.py", "tests/e2e/test_groups.py"
_E2E_STATES = "tests/e2e/test_states.py"
_SCHEDULER, _PAGES = "tests/vllm/test_multi.py", "tests/vllm/test_pages.py"
_STATES, _RINGS = "tests/vllm/test_states.py", "tests/vllm/test_rings.py"
_WEIGHTS, _KINDS = "tests/vllm/test_state_weights.py", "tests/vllm/test_kinds.py"
_HEADS = "the number of KV heads differs by layer"
_EQUAL_KERNELS = "block sizes and sorts of device must be equal"
_WHOLE = "pages of unknown content: tensor-parallel sizes and block sizes must be equal"
_DRAFTS = "pages are moved whole: block sizes, sorts of device and numbers of drafts must be equal"
_ROWS = (
    "rings and rows of several tokens are moved whole: block sizes, sorts of device and numbers of drafts must be equal"
)
_NO_CUT = "tensor-parallel sizes must be equal"
_REFERENCE = "with reference kernels, see [below](#recurrent-states)"

FAMILIES = (
    Family("Llama 2, 3", ("LlamaForCausalLM",), (_FULL,), "end to end", _E2E_PAIR),
    Family(
        "Qwen 2, 2.5, 3",
        ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        (_FULL,),
        "scheduler",
        _SCHEDULER,
    ),
    Family(
        "Mistral, Mixtral, Ministral", ("MistralForCausalLM", "MixtralForCausalLM"), (_FULL,), "scheduler", _SCHEDULER
    ),
    Family("GLM 4.5, 4.6", ("Glm4MoeForCausalLM",), (_FULL,), "scheduler", _SCHEDULER),
    Family("MiniMax M2", ("MiniMaxM2ForCausalLM",), (_FULL,), "scheduler", _SCHEDULER),
    Family(
        "Granite 3, Phi 3, Ernie 4.5, Hunyuan 3",
        ("GraniteForCausalLM", "Phi3ForCausalLM", "Ernie4_5_MoeForCausalLM", "HYV3ForCausalLM"),
        (_FULL,),
        "scheduler",
        _SCHEDULER,
    ),
    Family("Gemma 2", ("Gemma2ForCausalLM",), (_FULL, _WINDOW), "end to end", _E2E_GROUPS),
    Family("Gemma 3", ("Gemma3ForCausalLM",), (_FULL, _WINDOW), "scheduler", _SCHEDULER),
    Family("Gemma 3n", ("Gemma3nForCausalLM",), (_FULL, _WINDOW), "scheduler", _SCHEDULER, "layers that share a cache"),
    Family(
        "Gemma 4", ("Gemma4ForCausalLM",), (_FULL, _WINDOW), "scheduler", _KINDS, f"{_HEADS}; layers that share a cache"
    ),
    Family("gpt-oss", ("GptOssForCausalLM",), (_FULL, _WINDOW), "scheduler", _SCHEDULER),
    Family(
        "MiMo V2 Flash", ("MiMoV2FlashForCausalLM",), (_FULL, _WINDOW), "end to end", "tests/e2e/test_heads.py", _HEADS
    ),
    Family(
        "Step 3.5",
        ("Step3p5ForCausalLM",),
        (_FULL, _WINDOW),
        "scheduler",
        _KINDS,
        f"{_HEADS}; if its configuration leaves it open, {_NO_CUT}",
    ),
    Family(
        "Inkling",
        ("InklingForCausalLM",),
        (_FULL, _WINDOW, ("short convolutions", "SlidingWindowSpec")),
        "scheduler",
        _KINDS,
        f"{_HEADS}; convolutions have {_WHOLE}",
    ),
    Family("Nemotron NAS", ("DeciLMForCausalLM",), (_FULL,), "scheduler", _KINDS, _HEADS),
    Family("Llama 4", ("Llama4ForCausalLM",), (_FULL, _CHUNK), "scheduler", _KINDS),
    Family("DeepSeek V2", ("DeepseekV2ForCausalLM",), (_LATENT,), "end to end", _E2E_GROUPS),
    Family(
        "DeepSeek V3 and R1, Kimi K2, Mistral Large 3, GLM 4.7 Flash",
        ("DeepseekV3ForCausalLM", "MistralLarge3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        (_LATENT,),
        "scheduler",
        _KINDS,
    ),
    Family(
        "DeepSeek V3.2, GLM 5, Hunyuan 4",
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM"),
        (_LATENT, _INDEXER),
        "scheduler",
        _KINDS,
        "for an indexer's pages, sorts of device must be equal; on ROCm they are moved whole, and block sizes must be equal, too",
    ),
    Family(
        "DeepSeek V4",
        ("DeepseekV4ForCausalLM",),
        (("compressed MLA", "MLAAttentionSpec"), _INDEXER, ("window of MLA, compressors", "SlidingWindowMLASpec")),
        "scheduler",
        _KINDS,
        f"pages are moved whole: {_EQUAL_KERNELS}",
    ),
    Family(
        "DeepSeek V4.1",
        ("DeepseekV41ForCausalLM",),
        (_LATENT, _INDEXER, _REPLAYED, _RING),
        "scheduler",
        _KINDS,
        _DRAFTS,
    ),
    Family("GLM 5 Next", ("Glm5NextForCausalLM",), (_LATENT, _INDEXER, _RING), "scheduler", _KINDS, _DRAFTS),
    Family("Qwen 4 (experimental)", ("Qwen4ExpForCausalLM",), (_FULL, _STATE, _RING), "scheduler", _KINDS, _ROWS),
    Family(
        "Step 5",
        ("Step5ForCausalLM",),
        (_FULL, _WINDOW, ("rows of eight tokens", "FullAttentionSpec"), _RING),
        "scheduler",
        _RINGS,
        f"{_ROWS}; so must be the number of KV heads on a rank",
    ),
    Family(
        "MiniMax M3",
        ("MiniMaxM3SparseForCausalLM",),
        (("sparse attention", "FullAttentionSpec"), _INDEXER),
        "scheduler",
        _KINDS,
        _WHOLE,
    ),
    Family(
        "LFM 2",
        ("Lfm2ForCausalLM",),
        (_FULL, _STATE),
        "end to end",
        _E2E_STATES,
        "on CPUs, with other tensor-parallel sizes, see [below](#recurrent-states)",
    ),
    Family("Nemotron H and Nano 2", ("NemotronHForCausalLM",), (_FULL, _STATE), "end to end", _E2E_STATES),
    Family(
        "Granite 4, Falcon H1, Zamba 2",
        ("GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM", "Zamba2ForCausalLM"),
        (_FULL, _STATE),
        "scheduler",
        _STATES,
    ),
    Family(
        "Qwen 3 Next, Qwen 3.5",
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        (_FULL, _STATE),
        "end to end",
        _E2E_STATES,
        _REFERENCE,
    ),
    Family("Jamba", ("JambaForCausalLM",), (_FULL, _STATE), "end to end", _E2E_STATES, _REFERENCE),
    Family("Kimi Linear", ("KimiLinearForCausalLM",), (_LATENT, _STATE), "end to end", _E2E_STATES, _REFERENCE),
    Family("Kimi K3", ("KimiK3ForConditionalGeneration",), (_LATENT, _STATE), "planner", _WEIGHTS),
    Family(
        "Whisper",
        ("WhisperForConditionalGeneration",),
        (("cross attention", "CrossAttentionSpec"), _FULL),
        "planner",
        _PAGES,
    ),
)


def families() -> str:
    """Return the table of models."""
    lines = ["| models | groups | state | shown by | last vLLM | note |", "|---|---|---|---|---|---|"]
    for f in FAMILIES:
        groups = "<br/>".join(dict.fromkeys(what for what, _ in f.groups))
        by = "tests/vllm/test_catalogue.py" if f.refused else f.by
        lines.append(f"| {f.name} | {groups} | {_state(f)} | `{by}` | {f.release} | {f.note} |")
    return "\n".join(lines)


def _state(family: Family) -> str:
    return f"refused ({family.refused})" if family.refused else SHOWN[family.shown]


def kinds() -> str:
    """Return the table of vLLM's cache specs."""
    lines = [
        "| spec | kept | a page | may be cut by | depends on | source | shown by |",
        "|---|---|---|---|---|---|---|",
    ]
    for e in CATALOGUE.values():
        kept, p = f"{KEPT[e.kept]}: {e.why}" if e.why else KEPT[e.kept], PAGES[e.spec]
        lines.append(f"| `{e.spec}` | {kept} | {p.page} | {p.cut} | {p.depends} | {p.source} | `{p.shown}` |")
    return "\n".join(lines)


def writers() -> str:
    """Return the table of attention back ends."""
    lines = ["| attention back end | a page |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name.rpartition('.')[2]}` | {FORMS[form]} |" for name, form in WRITERS.items())])


TABLES = {"families": families, "kinds": kinds, "writers": writers}


def drawn(page: str) -> str:
    """Return the page with its tables as the code has them."""
    for name, table in TABLES.items():
        body = f"<!-- {name} -->\n{table()}\n<!-- end {name} -->"
        page, found = re.subn(f"<!-- {name} -->.*?<!-- end {name} -->", lambda _, b=body: b, page, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"{PAGE} has no place for the table {name!r}")
    return page


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
