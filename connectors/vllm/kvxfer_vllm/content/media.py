"""Images, audio and video of prompts, identified by what their processor has made of them.

vLLM's own names will not do: they hold the model's path, so that one model under two paths has two names for an image; they
lack the settings of the processor; and clients may choose them. What the tower gets is covered whole. How the towers work, as
far as that is not in the weights, is part of each item's identity, too.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from kvxfer.errors import KvxferError
from kvxfer.logs import logger
from kvxfer.text import printable
from kvxfer_vllm.content.facts import checkpoint
from kvxfer_vllm.content.hashing import content_hash, tensors_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

log = logger("kvxfer.vllm")

TOWER = (
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
)
"""vLLM's settings for media that towers depend on, or whose defaults processors take from a checkpoint."""

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a checkpoint that say how to process media; towers read some of it, too."""

REMEMBERED = 1 << 16
"""Names of items whose content is remembered. vLLM's caches know items by name."""
SEVERAL = ""
"""The content of a name that two items have had."""


class Media:
    """The media of one engine's requests."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._tower = _tower(vllm_config)
        self._known: OrderedDict[str, tuple[ref[Any], str]] = OrderedDict()
        self._doubted: set[str] = set()

    def content(self, feature: MultiModalFeatureSpec) -> str:
        """Return an item's identity.

        Raises:
            KvxferError: Its content is not known here, or vLLM may have another item cached under its name.
        """
        item, name = feature.data, feature.identifier
        before = self._known.get(name)
        if before is not None and before[1] != SEVERAL and item is not None and before[0]() is item:
            self._known.move_to_end(name)
            return before[1]
        found = self._hash(feature)
        if before is not None and before[1] != found:
            self._known[name] = before[0], SEVERAL  # from now on vLLM may have either cached
            self._doubted.add(name)
            raise KvxferError(
                f"two different items of {feature.modality} were named {printable(name)!r}, and vLLM may use the results of the "
                "wrong one: give each item a uuid of its own, or none"
            )
        self._known[name] = ref(item), found
        self._known.move_to_end(name)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    def note(self, features: Iterable[MultiModalFeatureSpec]) -> None:
        """Learn the names of all these items, whatever is wrong with one of them."""
        for feature in features:
            with suppress(KvxferError):
                self.content(feature)

    def is_ambiguous(self, name: str) -> bool:
        """Return whether two items have had a name."""
        known = self._known.get(name)
        return known is not None and known[1] == SEVERAL

    def take_doubted(self) -> set[str]:
        """Return the names that two items have had, as it turned out since the last call."""
        doubted, self._doubted = self._doubted, set()
        return doubted

    def _hash(self, feature: MultiModalFeatureSpec) -> str:
        item = feature.data
        if item is not None and "address" in item:
            raise KvxferError(
                "its images or other media are in memory that the scheduler does not read: set --mm-processor-cache-type lru"
            )
        data = {} if item is None else {name: element.data for name, element in item.items()}
        # Where embeddings come from another engine, a request has little more than their number.
        held = sum(t.numel() for t in tensors_in(data) if t.is_floating_point() or t.element_size() == 1)
        if held < feature.mm_position.length:
            raise KvxferError(
                f"its {feature.modality} is not in the request, only a name for it, and two engines may have two items of that name"
            )
        return content_hash(self._tower, feature.modality, data)


def _tower(vllm_config: VllmConfig) -> str:
    """Return a hash of what towers depend on besides their weights and what they are given."""
    model = vllm_config.model_config
    media = getattr(model, "multimodal_config", None)
    scales = getattr(media, "mm_encoder_fp8_scale_path", None)
    settings = {name: getattr(media, name, None) for name in TOWER}
    files: dict[str, Any] = {}
    try:
        folder = checkpoint(model.model, model.revision, vllm_config.load_config.download_dir)
        files = {name: json.loads((folder / name).read_bytes()) for name in FILES if (folder / name).is_file()}
        if scales is not None:
            files["scales"] = json.loads(Path(scales).read_bytes())
    except (OSError, ValueError) as e:
        if media is not None:
            log.warning("how %r processes media cannot be read (%s): its name is compared instead", model.model, e)
        files = {"name": str(model.model)}
    return content_hash(json.dumps([settings, files], sort_keys=True, default=str))
