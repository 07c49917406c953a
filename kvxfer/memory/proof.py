"""A proof that an engine writes its cache where the views of it say, found by letting the engine write.

Nothing is assumed of how a page is encoded. The engine's own write puts the same tokens into several blocks (values A),
but in each block some of the *cells* (an input, such as K, of one head of one token) have values B. A byte is compared
with the block that has no B at all: it may differ only where a cell of its unit has B, and a unit all of whose cells
have B must differ. Which cells have B is drawn from the bits of their coordinates, and from the complements, so that
for any two tokens, heads or inputs there is a block in which one has B and the other has not. A unit that depends on
anything but its own cells therefore shows, however the bytes are packed, quantised or scaled.

Blocks of an elastic cache that nobody has taken yet may all be one memory: kvcached maps one page wherever there is none. That
is found out first. Blocks are then written and read one by one, which tells all but which page of the cache a block is in.

Layers that share their views differ only in where they begin. The first of them is written to in all these ways (a
*trial* of many *rounds*), each other one in a few rounds that tell neighbours apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.geometry import Cache, View

if TYPE_CHECKING:
    import torch

__all__ = ["Proof", "Unproven", "Write"]

Bools = np.ndarray[Any, np.dtype[np.bool_]]

_MIN_BLOCKS = 4
"""Two to write into, and one on each side of them."""


class Unproven(Exception):
    """A description cannot be compared with a write; the message says why."""


@dataclass(frozen=True)
class Write:
    """An engine's own write of tokens into one layer.

    Attributes:
        inputs: By name, the shape of one token in each tensor that is written: ``(heads, size)``, or ``(size,)`` where
            there are no heads. A plane with an input's name depends on that input, any other plane on all of them.
        dtype: Of these tensors.
        call: Starts the write on the current stream. It takes the tensors in that order, ``[tokens, *shape]`` each, and
            the tokens' slots (int64, ``block * tokens of a block here + token``), all contiguous and on the cache's device.
    """

    inputs: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    call: Callable[[Sequence[torch.Tensor], torch.Tensor], None]

    @property
    def heads(self) -> int:
        """The number of heads that are written, 1 where the inputs have none."""
        return max(shape[0] if len(shape) > 1 else 1 for shape in self.inputs.values())


class Proof:
    """Compares one cache with what the engine writes, layer by layer, while nobody else uses the cache.

    What layers have in common is kept as long as this object lives.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._trials: dict[tuple[object, ...], _Trial] = {}
        self._right: set[tuple[object, ...]] = set()  # views and trials that some layer was found right with

    def difference(self, layer: str, memory: torch.Tensor, write: Write) -> str | None:
        """Compare a layer's description with what the engine writes. Waits for the device.

        Blocks that were written to are afterwards as they were.

        Args:
            layer: One that is in a view of the cache.
            memory: The engine's tensor of it, blocks first. All that changes there must lie in the views.
            write: The engine's write into it.

        Returns:
            What was expected and what was found instead; ``None`` if the description is right.

        Raises:
            Unproven: No comparison is possible: the group is of states, there are too few blocks, the write raises, or
                parts of one block are the same memory.
        """
        views = [view for view in self.cache.views if layer in view.layers]
        group = self.cache.groups[views[0].group]
        blocks = min(len(memory), *(view.blocks for view in views))
        if group.kind == "state":
            raise Unproven("a state is not written by token")
        if blocks < _MIN_BLOCKS:
            raise Unproven(f"{blocks} blocks are too few")
        for view in views:
            if view.heads is not None and view.heads.stride is not None and view.heads.count != write.heads:
                return (
                    f"expected {view.heads.count} heads of plane {view.plane!r}; found that {write.heads} are written"
                )
        tokens = views[0].tokens(group.block_tokens)
        found = [_Plane.of(view, layer, group.block_tokens, self.cache, memory) for view in views]
        if wrong := next((plane for plane in found if isinstance(plane, str)), None):
            return wrong
        planes = [plane for plane in found if isinstance(plane, _Plane)]
        trial = self._trial(write, tokens, memory.device)
        alike = (*map(id, views), id(trial))
        if alike in self._right and _run(trial, trial.few, planes, memory, blocks, write) is None:
            return None
        wrong = _run(trial, list(range(len(trial.rounds))), planes, memory, blocks, write)
        if wrong is None:
            self._right.add(alike)
        return wrong

    def _trial(self, write: Write, tokens: int, device: torch.device) -> _Trial:
        key = (*write.inputs.items(), write.dtype, tokens, device)
        if key not in self._trials:
            self._trials[key] = _Trial.of(write, tokens, device)
        return self._trials[key]


@dataclass(frozen=True)
class _Trial:
    """What to write into a layer, and what must follow from it."""

    inputs: tuple[str, ...]  # names of the tensors that are written
    rounds: Bools  # which cells have values B, ``[round, input, head, token]``; none in the first, all in the second
    few: list[int]  # rounds that tell neighbours apart
    values: tuple[torch.Tensor, ...]  # for each input, ``[round, token, ...]``

    @classmethod
    def of(cls, write: Write, tokens: int, device: torch.device) -> _Trial:
        import torch

        rounds, few = _rounds(len(write.inputs), write.heads, tokens)
        rng, values = torch.Generator("cpu").manual_seed(0), []
        for i, shape in enumerate(write.inputs.values()):
            # Signs at random and magnitudes from 2^-8 to 2^4, so that most of what is rounded, clipped or scaled differs;
            # one large value, so that a scale does.
            a, b = (
                torch.exp2(12 * torch.rand(tokens, *shape, generator=rng, device="cpu") - 8)
                * (torch.randint(2, (tokens, *shape), generator=rng, device="cpu") * 2 - 1)
                for _ in range(2)
            )
            b[..., 0] = 256
            chosen = torch.from_numpy(rounds[:, i].swapaxes(1, 2)).unsqueeze(-1)  # [round, token, head, 1]
            chosen = chosen if len(shape) > 1 else chosen[:, :, 0]
            # Contiguous, as an engine's own are: some kernels do not ask how far apart the heads of a token are.
            values.append(torch.where(chosen, b, a).to(device, write.dtype).contiguous())
        return cls(tuple(write.inputs), rounds, few, tuple(values))

    def expected(self, view: View) -> tuple[Bools, Bools]:
        """Return which units may differ from the first round, and which must: ``[round, head, token]`` each."""
        of_plane = [self.inputs.index(view.plane)] if view.plane in self.inputs else list(range(len(self.inputs)))
        inside = (1, *((2,) if _head_stride(view) is None else ()), *((3,) if view.token_stride is None else ()))
        cells = self.rounds[:, of_plane]
        may, must = np.any(cells, inside, keepdims=True), np.all(cells, inside, keepdims=True)
        return may[:, 0], must[:, 0]

    def cell(self, pattern: Bools, rounds: list[int]) -> str:
        """Say what a byte holds that differs in these rounds."""
        found = np.argwhere((self.rounds[rounds] == pattern[:, None, None, None]).all(0))
        if len(found) != 1:
            return "what depends on other heads, tokens, inputs or blocks"
        ((i, head, token),) = found
        return f"what the engine wrote of token {token} of head {head} of {self.inputs[i]}"


def _rounds(*shape: int) -> tuple[Bools, list[int]]:
    rounds, few = [np.zeros(shape, np.bool_), np.ones(shape, np.bool_)], [0, 1]
    for n, at in zip(shape, np.indices(shape), strict=True):
        few += [len(rounds)] * (n > 1)
        for bit in range((n - 1).bit_length()):
            rounds += [at >> bit & 1 == 1, at >> bit & 1 == 0]
    return np.stack(rounds), few


@dataclass(frozen=True)
class _Plane:
    """One plane of a layer, with all its units in memory, uint8 ``[block, head, token, unit]``."""

    view: View
    units: torch.Tensor

    @classmethod
    def of(cls, view: View, layer: str, tokens: int, cache: Cache, memory: torch.Tensor) -> _Plane | str:
        import torch

        offset, storage = view.offsets[view.layers.index(layer)], memory.untyped_storage()
        at = bisect.bisect_right(cache.starts, offset) - 1
        begin = cache.regions[at].address + offset - cache.starts[at] - storage.data_ptr()
        end = begin + view.extent(tokens)
        if not 0 <= begin < end <= storage.nbytes():
            return (
                f"expected plane {view.plane!r} in the {storage.nbytes()} bytes that the layer's cache is in; found it "
                f"in [{begin}, {end}) of them"
            )
        heads, head_stride = (view.heads.count, _head_stride(view)) if view.heads is not None else (1, None)
        here = view.tokens(tokens) if view.token_stride is not None else 1
        shape = view.blocks, heads if head_stride is not None else 1, here
        strides = view.block_stride, head_stride or 1, view.token_stride or 1
        flat = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(storage)
        return cls(view, flat.as_strided((*shape, view.unit), (*strides, 1), begin))


def _head_stride(view: View) -> int | None:
    return None if view.heads is None else view.heads.stride


def _run(
    trial: _Trial, rounds: list[int], planes: list[_Plane], memory: torch.Tensor, blocks: int, write: Write
) -> str | None:
    """Write some rounds, each to a block of its own, and compare; in as many turns as the number of blocks requires."""
    import torch

    memory = memory.view(torch.uint8)
    # Far apart, so that a wrong block stride shows. Block 0 has a meaning for some engines: it is looked at only.
    written = torch.from_numpy(np.unique(np.linspace(1, blocks - 2, len(rounds)).astype(np.int64))).to(memory.device)
    beside = torch.tensor([0, blocks - 1], device=memory.device)
    apart = _apart(memory, written, beside)
    before = memory.index_select(0, written), [plane.units.index_select(0, beside) for plane in planes]
    try:
        pages, escaped = _pages(trial, rounds, planes, memory, written, write, at_once=len(written) if apart else 1)
        after = [plane.units.index_select(0, beside) for plane in planes]
    finally:
        memory[written] = before[0]
    for plane, was, now, units in zip(planes, before[1], after, pages, strict=True):
        if wrong := _compare(trial, rounds, plane.view, units):
            return wrong
        if apart and not torch.equal(was, now):
            return (
                f"expected plane {plane.view.plane!r} of blocks that nothing was written to as it was; found it changed"
            )
    if escaped:
        names = ", ".join(repr(plane.view.plane) for plane in planes)
        return f"expected all that is written of a block in {names}; found {escaped} bytes that changed outside"
    return None


def _apart(memory: torch.Tensor, written: torch.Tensor, beside: torch.Tensor) -> bool:
    """Return whether these blocks each have memory of their own; they are as before afterwards.

    Raises ``Unproven`` if even a single block has not.
    """
    import torch

    before, looked_at = memory.index_select(0, written), memory.index_select(0, beside)
    noise = torch.randint(256, before.shape, dtype=torch.uint8, generator=torch.Generator("cpu").manual_seed(0))
    noise = noise.to(memory.device)
    try:
        memory[written] = noise
        if torch.equal(memory[written], noise) and torch.equal(memory[beside], looked_at):
            return True
        memory[written[:1]] = noise[:1]
        if torch.equal(memory[written[:1]], noise[:1]):
            return False
        raise Unproven("its pages are not mapped yet, and parts of a block are the same memory until then")
    finally:
        memory[written] = before


def _pages(
    trial: _Trial,
    rounds: list[int],
    planes: list[_Plane],
    memory: torch.Tensor,
    written: torch.Tensor,
    write: Write,
    at_once: int,
) -> tuple[list[torch.Tensor], int]:
    """Write the rounds, ``at_once`` of them at a time, and read back what is in the blocks.

    Returns:
        For each plane the units of all rounds, ``[round, head, token, unit]``; and how many bytes of a block outside
        all planes differed when all cells did.
    """
    import torch

    tokens = torch.arange(trial.rounds.shape[-1], device=memory.device)
    turns, plain = [], list[torch.Tensor]()
    for first in range(0, len(rounds), at_once):
        turn = rounds[first : first + at_once]
        blocks = written[: len(turn)] if at_once > 1 else written[[first % len(written)]]
        slots = (blocks[:, None] * len(tokens) + tokens).flatten()
        try:
            write.call([v[turn].flatten(0, 1) for v in trial.values], slots)
        except Exception as e:  # whatever a kernel says that takes other arguments
            raise Unproven(f"its write fails: {e or type(e).__name__}") from e
        turns.append([plane.units.index_select(0, blocks) for plane in planes])
        plain += list(memory.index_select(0, blocks[: 2 - len(plain)])) if len(plain) < 2 else []
    pages = [torch.cat(units) for units in zip(*turns, strict=True)]
    inside = sum(int((units[1] != units[0]).sum()) for units in pages)
    return pages, int((plain[1] != plain[0]).sum()) - inside


def _compare(trial: _Trial, rounds: list[int], view: View, units: torch.Tensor) -> str | None:
    import torch

    may, must = (which[rounds] for which in trial.expected(view))
    words = units.view(torch.int64) if units.shape[-1] % 8 == 0 else units
    differs = (words != words[0]).any(-1).cpu().numpy()
    wrong = (differs & ~may) | (must & ~differs)
    if not wrong.any():
        return None
    head, token = np.argwhere(wrong.any(0))[0]
    where = f"plane {view.plane!r}"
    if _head_stride(view) is not None:
        where = f"head {head} of {where}"
    if view.token_stride is not None:
        where = f"token {token} of {where}"
    unit = (units[:, head, token] != units[0, head, token]).cpu().numpy()  # [round, byte]
    strange = np.flatnonzero((unit & ~may[:, head, token, None]).any(0))
    if len(strange):
        found = f"{trial.cell(unit[:, strange[0]], rounds)} in byte {strange[0]} of its {view.unit}"
    else:
        found = "bytes that it did not write"
    return f"expected what the engine wrote of {where} there; found {found}"
