"""What vLLM's pages hold: the catalogue, and what follows from it for an engine's groups and layers."""

from kvxfer_vllm.pages.catalogue import CATALOGUE, Entry, entry_of
from kvxfer_vllm.pages.encoding import encoding_of
from kvxfer_vllm.pages.forms import INDEXER_SCALED, WRITERS, Form, form_of, indexer_rows, replicated, writer_of
from kvxfer_vllm.pages.groups import GroupPages, group_pages, layer_specs, replays, takes_turns
from kvxfer_vllm.pages.heads import total_heads
from kvxfer_vllm.pages.states import state_pieces

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
