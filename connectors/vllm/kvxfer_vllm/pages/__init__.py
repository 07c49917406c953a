"""What vLLM's pages hold: the catalogue, and what follows from it for an engine's groups and layers."""

from kvxfer_vllm.pages.catalogue import CATALOGUE, Entry, entry_of
from kvxfer_vllm.pages.forms import (
    INDEXER_SCALED,
    WRITERS,
    Form,
    encoding_of,
    form_of,
    indexer_rows,
    replicated,
    writer_of,
)
from kvxfer_vllm.pages.groups import (
    GroupPages,
    group_pages,
    layer_specs,
    replays,
    state_pieces,
    takes_turns,
    total_heads,
)

__all__ = [
    "CATALOGUE",
    "WRITERS",
    "Entry",
    "Form",
    "INDEXER_SCALED",
    "GroupPages",
    "encoding_of",
    "entry_of",
    "form_of",
    "group_pages",
    "indexer_rows",
    "layer_specs",
    "state_pieces",
    "takes_turns",
    "replays",
    "replicated",
    "total_heads",
    "writer_of",
]
