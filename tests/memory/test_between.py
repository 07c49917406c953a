"""Engines on any memory move KV to engines on any other, in all layouts: the bytes are those that host memory gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvxfer.config import Config
from kvxfer.identity import TransferId
from kvxfer.memory import allocate, registry
from kvxfer.testing.spaces.layouts import LAYOUTS, Held, hold_cache, layout_pairs, plan_between
from kvxfer.values import BlockTable, Fetch, Offer
from tests.conftest import require
from tests.control.conftest import Ended, Released, SeededEngine, until
from tests.memory.island import install

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "kvxfer-vault"))

MEMORIES = {
    "cpu": ("kvxfer.memory.cpu:CpuSpace", "cpu"),
    "island": ("tests.memory.island:IslandSpace", "island:0"),
    "vault": ("kvxfer_vault:VaultSpace", "vault:0"),
    "cuda": ("kvxfer.memory.cuda:CudaSpace", "cuda:0"),
}
WAYS = [(a, b) for a in MEMORIES for b in MEMORIES if (a, b) != ("cpu", "cpu") and "cuda" not in (a, b)]
ON_GPU = [(a, b) for a in ("vault", "cpu", "island") for b in ("cuda",)] + [("cuda", a) for a in ("vault", "island")]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind in ("island", "vault"):
        monkeypatch.syspath_prepend(str(install(tmp_path / kind, kind, MEMORIES[kind][0])))
    registry.space_for.cache_clear()
    yield
    registry.space_for.cache_clear()


def engine(name: str, held: Held, backend: str) -> SeededEngine:
    settings = Config.from_mapping({"backend": backend, "integrity": "full", "staging_bytes": 1 << 20})
    return SeededEngine(settings, SimpleNamespace(caches=[held.on_device]), name=name)  # type: ignore[arg-type]


def moves(backend: str, memories: tuple[str, str], layouts: list[tuple[str, str]]) -> None:
    kinds = [(registry.load(target, "for tests"), device) for target, device in map(MEMORIES.__getitem__, memories)]
    for i, (src, dst) in enumerate(layouts):
        source, sink = (
            hold_cache(LAYOUTS[name], *kind, seed)
            for seed, (name, kind) in enumerate(zip((src, dst), kinds, strict=True))
        )
        p, d = engine("p", source, backend), engine("d", sink, backend)
        try:
            (lo, hi), transfer = source.layout.wanted, TransferId(f"own/1/{i}", 0)
            d.agents[0].fetch(Fetch("r", transfer, b"d", p.source, BlockTable.of([sink.blocks(2)]), lo, hi, None))
            p.agents[0].offer(Offer(transfer, b"d", 1, hi, BlockTable.of([source.blocks(1)]), True))
            until(lambda d=d: any(isinstance(e, Released) for e in d.events()), 20)  # type: ignore[misc]
            (end,) = (e for e in d.events() if isinstance(e, Ended))
            assert end.outcome.delivered, end
        finally:
            p.close()
            d.close()
        check(source, sink)


def check(source: Held, sink: Held) -> None:
    made = plan_between(source, sink)
    staged = allocate(made.nbytes)
    source.host.pack(made, staged)
    sink.host.unpack(made, staged)
    for held in (source, sink):
        for found, wanted in zip(held.image(), held.expected(), strict=True):
            assert (found == wanted).all()


@pytest.mark.parametrize("memories", WAYS, ids=" to ".join)
def test_a_third_of_all_layouts_by_tcp(memories: tuple[str, str]) -> None:
    """Another third for each way in turn, so that each two layouts move two ways or three."""
    moves("tcp", memories, layout_pairs()[WAYS.index(memories) % 3 :: 3])


@pytest.mark.slow
@pytest.mark.parametrize("memories", WAYS, ids=" to ".join)
def test_all_layouts_by_tcp(memories: tuple[str, str]) -> None:
    moves("tcp", memories, layout_pairs())


@pytest.mark.parametrize("memories", [("vault", "cpu"), ("cpu", "vault"), ("island", "vault")], ids=" to ".join)
@pytest.mark.parametrize("backend", ["nixl", "ucx", "cma"])
def test_some_layouts_by_others(backend: str, memories: tuple[str, str]) -> None:
    require(backend)
    moves(backend, memories, [("tokens first", "k beside v"), ("odd, padded", "odd, k beside v"), ("pages", "pages")])


@pytest.mark.gpu
@pytest.mark.parametrize("memories", ON_GPU, ids=" to ".join)
@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_all_layouts_with_a_gpu(backend: str, memories: tuple[str, str]) -> None:
    moves(backend, memories, layout_pairs()[:: 1 if backend == "tcp" else 7])
