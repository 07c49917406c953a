"""Which adapters (LoRA) vLLM has loaded, by the weights that it has in memory.

An adapter's name, number and path do not tell. Its files may have changed after vLLM read them, and vLLM reads them again when
it has dropped the adapter, when it is told to (``load_inplace``), and from then on in every step. So the process that loads an
adapter hashes what it has loaded. The scheduler's process asks for that when vLLM has been told to load one, and hears
of everything else with the workers' reports.

vLLM has no hooks for this, so two of its methods are wrapped (``internals``).
An adapter that was loaded past them is unknown, and nothing is moved for its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from kvxfer.errors import KvxferError
from kvxfer.logs import logger
from kvxfer.text import printable
from kvxfer_vllm.content.hashing import content_hash
from kvxfer_vllm.internals import adapters_of, after_adding_adapter, after_loading_adapter, weights_of
from kvxfer_vllm.requests import RequestFacts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

log = logger("kvxfer.vllm")

Contents = Mapping[int, str]
"""The hash of each adapter's weights, by vLLM's number for it."""

UNKNOWN = ""


class LoadedAdapters:
    """What one worker has loaded.

    Attributes:
        contents: The adapters that it loaded last under each number.
        replacements: How often a step has loaded other weights under a number that was in use.
    """

    def __init__(self, lora_config: Any) -> None:
        self._lora_config = lora_config
        self.contents: dict[int, str] = {}
        self.replacements = self._heard = 0
        self._news = False
        if lora_config is not None:
            after_loading_adapter(_hear_of_loading)
            _workers.add(self)

    def of(self, lora_config: Any) -> bool:
        """Return whether this is the worker with that configuration: a process may have several."""
        return self._lora_config is lora_config

    def loaded(self, number: int, content: str) -> None:
        """Record what was loaded under a number."""
        before = self.contents.get(number)
        if content != before:
            self.contents[number] = content
            self._news = True
            self.replacements += before is not None

    @property
    def replaced(self) -> bool:
        """Whether there was a replacement that the scheduler did not know of when it planned this step."""
        return self.replacements > self._heard

    def heard(self, replacements: int) -> None:
        """Record of how many replacements the scheduler knew when it planned the step that is about to be made."""
        self._heard = max(self._heard, replacements)

    def report(self) -> dict[int, str]:
        """Return what has been loaded if that is not what was returned last, else nothing."""
        news, self._news = self._news, False
        return dict(self.contents) if news else {}

    def take_news(self) -> dict[int, str]:
        """Return the same to a scheduler that plans no step before it knows."""
        self.heard(self.replacements)
        return self.report()


class Adapters:
    """What the workers of one engine have loaded, as far as the scheduler's process knows.

    Attributes:
        change_media: Whether adapters affect what the towers make of images and other media, which vLLM caches by the adapter's name.
        heard: By rank, how many replacements it has reported.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._ranks = vllm_config.parallel_config.world_size
        self._lora_config = lora = getattr(vllm_config, "lora_config", None)
        modules = sorted(map(str, getattr(lora, "target_modules", None) or ()))
        self._settings = [str(getattr(lora, "enable_tower_connector_lora", False)), *modules]
        self.change_media = bool(getattr(lora, "enable_tower_connector_lora", False))
        self.heard: dict[int, int] = {}
        self._contents: dict[int, dict[int, str]] = {}
        self._replaced: Counter[int] = Counter()
        self._any_replaced = False
        self._first: dict[str, tuple[str, int]] = {}
        if lora is not None:
            after_adding_adapter(_hear_of_adding)
            _engines.add(self)

    def of(self, lora_config: Any) -> bool:
        """Return whether these are the adapters of the engine with that configuration: a process may have several."""
        return self._lora_config is lora_config

    def learn(self, rank: int, contents: Contents, replacements: int = 0) -> None:
        """Record what a rank has loaded, and how often that was a replacement of which nobody had told it."""
        if replacements:
            self.heard[rank] = replacements
        for number, content in contents.items():
            by_rank = self._contents.setdefault(number, {})
            if by_rank.get(rank, content) != content:
                self._replace(number)
            by_rank[rank] = content

    def doubt(self, number: int) -> None:
        """Record that an adapter may have been loaded again, and that the workers have not said what."""
        if self._contents.pop(number, None):
            self._replace(number)

    def _replace(self, number: int) -> None:
        self._replaced[number] += 1
        self._any_replaced = True

    def _version(self, adapter: LoRARequest) -> tuple[str, int]:
        """Return the hash of an adapter's weights, or ``UNKNOWN``; and how often they were replaced under its number."""
        by_rank = self._contents.get(adapter.lora_int_id, {})
        # Ranks hold parts of their own of an adapter for experts that are spread over them.
        known = "/".join(sorted(set(by_rank.values()))) if len(by_rank) == self._ranks else UNKNOWN
        return known, self._replaced[adapter.lora_int_id]

    def content(self, facts: RequestFacts, adapter: LoRARequest) -> str:
        """Return what the adapter of a request is for its digest, and note on the request which weights these are.

        Raises:
            UnknownAdapterError: It is not known which weights vLLM has loaded for it.
        """
        known, replaced = self._version(adapter)
        if known == UNKNOWN:
            raise UnknownAdapterError(adapter)
        facts.adapter = adapter.lora_int_id, replaced
        return content_hash(self._settings, known)

    def is_same(self, facts: RequestFacts) -> bool:
        """Return whether a request's adapter, if it has one, has the weights that it had when the request arrived."""
        return facts.adapter is None or facts.adapter[1] == self._replaced[facts.adapter[0]]

    def take_replaced(self) -> bool:
        """Return whether an adapter has been replaced since the last call."""
        replaced, self._any_replaced = self._any_replaced, False
        return replaced

    def cached_under(self, adapter: LoRARequest) -> str | None:
        """Return what must be added to the prefix cache's keys for an adapter; None if its name is enough.

        vLLM's keys have an adapter's name and path. Blocks of other weights may be cached under them if it was loaded again.
        """
        now = self._version(adapter)
        if now == self._first.setdefault(adapter.lora_name, now) and not now[1]:
            return None
        return f"kvxfer {adapter.lora_int_id} {now[1]} {now[0]}"


class UnknownAdapterError(KvxferError):
    """It is not known which weights an adapter has, so nothing is moved for its requests."""

    def __init__(self, adapter: LoRARequest) -> None:
        self.adapter = printable(adapter.lora_name)
        super().__init__(
            f"which weights vLLM has loaded for the adapter {self.adapter!r} is not known: load it before it is used, with "
            "--lora-modules, /v1/load_lora_adapter or the engine's add_lora; until then its requests are computed here"
        )


_workers: WeakSet[LoadedAdapters] = WeakSet()
_engines: WeakSet[Adapters] = WeakSet()


def adapter_loaded(lora_config: Any, number: int, answers: Callable[[], Iterable[Contents]]) -> None:
    """Pass on to an engine's scheduler side what its workers have loaded, now that one more adapter was."""
    for engine in [engine for engine in _engines if engine.of(lora_config)]:
        engine.doubt(number)
        for rank, contents in enumerate(answers()):
            engine.learn(rank, contents)


def loaded_by(worker: Any) -> dict[int, str]:
    """Return what a worker has loaded; vLLM calls this in the worker's process."""
    lora_config = adapters_of(worker)
    found = [loaded for loaded in _workers if loaded.of(lora_config)]
    for loaded in found:
        loaded.take_news()
    return dict(found[0].contents) if found else {}


def _hear_of_loading(lora_config: Any, number: int, adapter: Any) -> None:
    for worker in _workers:
        if worker.of(lora_config):
            worker.loaded(number, content_hash(*weights_of(adapter)))


def _hear_of_adding(lora_config: Any, number: int, ask: Callable[..., Iterable[Contents]]) -> None:
    adapter_loaded(lora_config, number, lambda: ask(loaded_by))
