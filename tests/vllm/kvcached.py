"""kvcached's own code in this process, over a vLLM for CPUs; what only a GPU can do is played: mapping and unmapping pages.

Its block pool, its coordinator and what it makes of an exhausted pool are its own. Its allocator of pages is `Pages`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(sys.prefix, "kvcached")
"""Where `make` puts kvcached (see the Makefile), outside of what Python imports from by itself."""

PAGE = 2048
"""Bytes of a block of one layer of the engines in `tests.vllm.engine`."""

NEWEST = "0.30.0"
"""The newest vLLM that kvcached 0.1.6 has patches for. A newer one is patched as if it were this."""


def lack() -> str | None:
    """Why `install` cannot make kvcached importable, or None if it can."""
    return None if (FOLDER / "kvcached").is_dir() else f"kvcached is not in {FOLDER}"


class Pages:
    """kvcached's allocator, played: so many blocks can have memory at a time, whatever their ids.

    What was freed last is handed out first, the worst for late reads and writes.

    Attributes:
        limit: How many blocks can have memory.
        in_use: Those that have.
        changed: Called with each block that has got memory, or lost it.
        said: What `available_size` says, if not the truth: another engine on the device has taken the rest meanwhile.
    """

    def __init__(self, blocks: int, limit: int) -> None:
        self._unused = list(range(blocks - 1, 0, -1))  # block 0 is nobody's
        self.limit = limit
        self.changed: Callable[[int, bool], None] = lambda block, mapped: None
        self.in_use: set[int] = set()
        self.said: int | None = None

    def alloc(self, count: int) -> list[int] | None:
        if count > self.limit - len(self.in_use):
            return None
        taken = [self._unused.pop() for _ in range(count)]
        self.in_use.update(taken)
        for block in taken:
            self.changed(block, True)
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert block in self.in_use, f"block {block} is freed twice"
            self.in_use.remove(block)
            self._unused.append(block)
            self.changed(block, False)

    def available_size(self) -> int:
        return self.limit - len(self.in_use) if self.said is None else self.said


def install() -> None:
    """Make `import kvcached` work in this process, and have its patches apply to this vLLM. Any number of times."""
    if "kvcached" in sys.modules:
        return
    sys.path.append(str(FOLDER))
    driver = types.ModuleType("kvcached.vmm_ops")
    driver.__getattr__ = lambda name: _absent(name)  # type: ignore[method-assign]
    sys.modules["kvcached.vmm_ops"] = driver
    versions = importlib.import_module("kvcached.integration.version_utils")
    manager = versions.VersionManager.get_instance()
    found = manager.detect_version("vllm")
    if found is None or not versions.VersionRange("<0.31.0").contains(found):
        manager.detect_version = lambda library: NEWEST
    patches = importlib.import_module("kvcached.integration.vllm.patches")
    for patch in (
        patches.ElasticBlockPoolPatch(),
        patches.KVCacheCoordinatorPatch(),
        patches.KVCacheManagerAllocateSlotsPatch(),
    ):
        assert patch.apply(importlib.import_module(patch.target_module)), patch.patch_name


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: object, **__: object) -> object:
        raise RuntimeError(f"kvcached calls the driver: {name}")

    return call


@contextlib.contextmanager
def enabled(pages: Callable[[int], Pages]) -> Iterator[None]:
    """Have vLLM's schedulers that are made meanwhile use kvcached; `pages` makes the allocator of so many blocks."""
    install()
    interfaces = importlib.import_module("kvcached.integration.vllm.interfaces")
    with (
        mock.patch.dict("os.environ", ENABLE_KVCACHED="true"),
        mock.patch.object(interfaces, "_kvcached_initialized", True),
        mock.patch.object(interfaces, "get_kv_cache_manager", lambda blocks, *_, **__: pages(blocks)),
    ):
        yield


def tensors(layers: Sequence[str], blocks: int) -> list[Any]:
    """The layers of a cache in one buffer, as kvcached's default layout has them: block by block, a page of each layer."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    packed = PAGE * len(layers)
    return [KVCacheTensor(size=packed * blocks, layers=list(layers), layer_stride=PAGE, block_stride=packed, offset=0)]
