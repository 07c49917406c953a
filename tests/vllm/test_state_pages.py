"""Recurrent states between engines of other numbers of ranks, of either order of vLLM's, with and without room for drafts:
what arrives is what the consumer's ranks would have computed. Pages are written through vLLM's own views of them."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import require

require("vllm")

from vllm.model_executor.layers.mamba import mamba_utils  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.v1.kv_cache_interface import MambaSpec  # noqa: E402

from kvxfer.geometry import Cache, Group, Incompatible, Planner, Rank, Region, View, route  # noqa: E402
from kvxfer_vllm.internals import Layer  # noqa: E402
from kvxfer_vllm.pages.groups import state_pieces  # noqa: E402

Shapes = mamba_utils.MambaStateShapeCalculator
NAMES_REPLICAS = "tp_replicated" in {f.name for f in fields(MambaSpec)}
BLOCKS, TAPS = 5, 4
KINDS = [
    "ShortConv",
    "MambaMixer",
    "MambaMixer2 of 1 group",
    "MambaMixer2 of 4 groups",
    "QwenGatedDeltaNetAttention",
    "KimiGatedDeltaNetAttention",
]


def sections(kind: str) -> list[tuple[int, bool]]:
    """(channels, whether all ranks hold all of them) of each section of the whole model's convolution."""
    groups = 1 if "1 group" in kind else 4
    return {
        "ShortConv": [(24, False)],
        "MambaMixer": [(24, False)],
        "MambaMixer2": [(4 * 6, False), (groups * 5, groups == 1), (groups * 5, groups == 1)],
        "QwenGatedDeltaNetAttention": [(4 * 3, False), (4 * 3, False), (8 * 2, False)],
        "KimiGatedDeltaNetAttention": [(4 * 4, False)] * 3,
    }[kind.split()[0]]


def shapes(kind: str, size: int, drafts: int) -> tuple[tuple[int, ...], ...]:
    """What vLLM's layer says of a rank's states."""
    name = kind.split()[0]
    if name == "ShortConv":
        return Shapes.short_conv_state_shape(size, 24, TAPS, drafts)
    if name == "MambaMixer":
        return Shapes.mamba1_state_shape(size, 24, 3, TAPS)
    if name == "MambaMixer2":
        return Shapes.mamba2_state_shape(size, 24, 1 if "1 group" in kind else 4, 4, 6, 5, TAPS, drafts)
    if name == "KimiGatedDeltaNetAttention":
        return Shapes.kda_state_shape(size, 4, 4, conv_kernel_size=TAPS, num_spec=drafts)
    return Shapes.gated_delta_net_state_shape(size, 4, 8, 3, 2, TAPS, drafts)


class World:
    """One state of the whole model."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rng = kind, np.random.default_rng(1)
        self.inputs = [self.rng.normal(size=(TAPS - 1, n)) for n, _ in sections(kind)]
        whole = shapes(kind, 1, 0)
        self.matrix = self.rng.normal(size=whole[1]) if len(whole) > 1 else None

    def of(self, rank: int, size: int) -> tuple[np.ndarray, np.ndarray | None]:
        """What a rank computes of it: rows by channels, and its heads' matrices."""
        parts = [
            x if replicated else np.split(x, size, axis=1)[rank]
            for x, (_, replicated) in zip(self.inputs, sections(self.kind), strict=True)
        ]
        return np.concatenate(parts, axis=1), None if self.matrix is None else np.split(self.matrix, size)[rank]


class Side:
    """One rank: memory, and vLLM's views of it."""

    def __init__(
        self,
        kind: str,
        rank: int,
        size: int,
        drafts: int = 0,
        device: str = "cuda",
        replicated: bool = False,
        **more: Any,
    ) -> None:
        name = kind.split()[0]
        self.order, self.rank, self.size = mamba_utils.get_conv_state_layout(), rank, size
        self.shapes, self.dtypes = shapes(kind, size, drafts), (torch.bfloat16, torch.float32)
        self.dtypes = self.dtypes[: len(self.shapes)]
        held: dict[str, Any] = {"tp_replicated": True} if replicated else {}
        spec = MambaSpec(block_size=16, shapes=self.shapes, dtypes=self.dtypes, **held)
        said = {"norm": SimpleNamespace(n_groups=1 if "1 group" in kind else 4), "num_spec": drafts, **more}
        if name == "MambaMixer":
            del said["num_spec"]
        layer = type(name, (), {"__module__": "vllm.layers", **said})()
        page = spec.state_content_size_bytes + 24
        self.memory = torch.zeros(BLOCKS, 1, 1, page, dtype=torch.int8)
        bound: Any = SimpleNamespace(get_state_shape=lambda: self.shapes, get_state_dtype=lambda: self.dtypes)
        MambaBase.bind_kv_cache(bound, self.memory)
        self.states = bound.kv_cache
        found = state_pieces(Layer(layer), spec, Rank(0, rank), size, device)
        views = [View(p.plane, 0, ("l",), (p.offset,), BLOCKS, page, p.unit, p.encoding, p.heads) for p in found]
        region = Region(self.memory.data_ptr(), self.memory.nbytes)
        self.cache = Cache((region,), (Group(16, "state"),), tuple(views), Rank(0, rank))
        self.cache.check()

    def write(self, world: World, block: int) -> None:
        inputs, matrix = world.of(self.rank, self.size)
        state = self.states[0][block]
        state = state.T if self.order == "DS" else state
        state[: TAPS - 1] = torch.from_numpy(inputs).bfloat16()
        if matrix is not None:
            self.states[1][block] = torch.from_numpy(matrix).float()


def engine(
    monkeypatch: pytest.MonkeyPatch, kind: str, size: int, order: str, drafts: int = 0, **more: Any
) -> list[Side]:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: order)
    return [Side(kind, rank, size, drafts, **more) for rank in range(size)]


def load(p: list[Side], d: list[Side]) -> None:
    """From block 3 into block 1."""
    routes = route([s.cache for s in p], [s.cache for s in d])
    for side in d:
        for rank, assignments in routes[side.cache.rank].assignments.items():
            of = p[rank.tp]
            runs = Planner(of.cache, side.cache, assignments).plan([[3]], [[1]], 0, 9).runs()
            a, b = of.memory.numpy().ravel(), side.memory.numpy().ravel()
            for s, t, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
                b[t : t + n] = a[s : s + n]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("of", "to"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize(
    ("orders", "drafts"),
    [("SD SD", (0, 0)), ("DS DS", (2, 2)), ("SD DS", (0, 3)), ("DS SD", (2, 0))],
    ids=["SD", "DS with drafts", "into DS with drafts", "out of DS with drafts"],
)
def test_each_rank_gets_its_share(
    monkeypatch: pytest.MonkeyPatch, kind: str, of: int, to: int, orders: str, drafts: tuple[int, int]
) -> None:
    world = World(kind)
    p = engine(monkeypatch, kind, of, orders.split()[0], drafts[0])
    d, computed = (engine(monkeypatch, kind, to, orders.split()[1], drafts[1]) for _ in range(2))
    for side in p:
        side.memory.fill_(77)  # what drafts have left behind
        side.write(world, 3)
    for side in computed:
        side.write(world, 1)
    load(p, d)
    for got, expected in zip(d, computed, strict=True):
        assert torch.equal(got.memory, expected.memory)


def test_between_equal_engines_a_state_is_moved_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each row of each section one, or one for each section, and one for the matrices."""
    kind = "QwenGatedDeltaNetAttention"
    for order, most in (("SD", 3 * 3 + 1), ("DS", 3 + 1)):
        (side,) = engine(monkeypatch, kind, 1, order)
        assignments = route([side.cache], [side.cache])[Rank(0, 0)].assignments[Rank(0, 0)]
        assert Planner(side.cache, side.cache, assignments).plan([[3]], [[1]], 0, 9).rows <= most


@pytest.mark.skipif(not NAMES_REPLICAS, reason="this vLLM has no state that all ranks hold")
@pytest.mark.parametrize(("of", "to"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_a_state_that_all_ranks_hold(monkeypatch: pytest.MonkeyPatch, of: int, to: int) -> None:
    """The inputs of Qwen 4's convolution over n-grams: other numbers of ranks may have them, each rank has all of them."""
    monkeypatch.setattr(f"{__name__}.sections", lambda _: [(24, True)])
    monkeypatch.setattr(f"{__name__}.shapes", lambda _, size, drafts: Shapes.short_conv_state_shape(1, 24, TAPS))
    world = World("Qwen4ExpPLELayer")
    p = engine(monkeypatch, world.kind, of, "SD", replicated=True)
    d, computed = (engine(monkeypatch, world.kind, to, "SD", replicated=True) for _ in range(2))
    for side in p:
        side.write(world, 3)
    for side in computed:
        side.write(world, 1)
    load(p, d)
    for got, expected in zip(d, computed, strict=True):
        assert torch.equal(got.memory, expected.memory)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("MambaMixer2 of 4 groups", {"norm": None}),
        ("OlmoGatedDeltaNetAttention", {}),
        ("QwenGatedDeltaNetAttention", {"__module__": "somebodys.plugin"}),
    ],
)
def test_what_is_not_certain_goes_to_the_same_rank_of_an_equal_engine(
    monkeypatch: pytest.MonkeyPatch, kind: str, more: dict[str, Any]
) -> None:
    world = World(kind) if not kind.startswith("Olmo") else World("QwenGatedDeltaNetAttention")
    monkeypatch.setattr(f"{__name__}.shapes", lambda _, size, drafts, find=shapes: find(world.kind, size, drafts))
    two, other = (engine(monkeypatch, kind, 2, "SD", **more) for _ in range(2))
    for side in two:
        side.write(world, 3)
    load(two, other)
    assert all(torch.equal(a.memory[3], b.memory[1]) for a, b in zip(two, other, strict=True))
    with pytest.raises(Incompatible, match="plane|head"):
        load(two, engine(monkeypatch, kind, 4, "SD", **more))
    with pytest.raises(Incompatible, match=r"rows first.*channels first"):
        load(two, engine(monkeypatch, kind, 2, "DS", **more))


def test_cpu_kernels_may_use_the_rows_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    p = engine(monkeypatch, "ShortConv", 1, "SD", device="cpu")
    d = engine(monkeypatch, "ShortConv", 1, "SD", drafts=2, device="cpu")
    with pytest.raises(Incompatible, match="encoding"):
        load(p, d)
