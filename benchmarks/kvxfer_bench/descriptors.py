"""``kvxfer bench descriptors``: what NIXL takes to make a transfer of many rows, by its three ways to name them.

*Listed* is what back end ``nixl`` does: each transfer brings its rows. *Prepared*: all blocks of both caches are listed once, and a
transfer names its rows by index. *Strided*: the same, but the blocks of a layer are one entry of an ``Nx5`` list.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Annotated, Any

import numpy as np
import typer

__all__ = ["descriptors", "name_rows"]

START_S = 60.0


class _Cache:
    """A cache with layers outermost, which NIXL has registered. Each layer has a quarter more blocks than the transfer takes."""

    def __init__(self, name: str, device: str, layers: int, rows: int, row_bytes: int) -> None:
        import torch
        from nixl._api import nixl_agent, nixl_agent_config

        self.layers, self.row_bytes = layers, row_bytes
        self.blocks = rows // layers * 5 // 4 + 1
        self.memory = torch.zeros(layers * self.blocks * row_bytes, dtype=torch.uint8, device=device)
        self.segment = "DRAM" if device == "cpu" else "VRAM"
        self.agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory(self.memory)

    def where(self) -> tuple[int, int]:
        """Return the address, and the device's number."""
        return self.memory.data_ptr(), max(self.memory.get_device(), 0)


def _serve(told: Connection, device: str, layers: int, rows: int, row_bytes: int) -> None:
    cache = _Cache("there", device, layers, rows, row_bytes)
    told.send((cache.agent.get_agent_metadata(), *cache.where()))
    told.recv()


def name_rows(device: str, layers: int, rows: int, row_bytes: int, repeat: int) -> dict[str, Any]:
    """Read scattered blocks of another process by each way, in turns.

    Args:
        device: Memory of both caches: ``cpu``, or ``cuda`` for the first two GPUs.
        layers: Layers of each cache.
        rows: Rows of a transfer, a multiple of ``layers``.
        row_bytes: Bytes of a row.
        repeat: Rounds that count.

    Returns:
        Medians in microseconds: ``setup`` once for a cache and peer, ``make`` and ``move`` for each transfer.
    """
    here, there = ("cpu", "cpu") if device == "cpu" else ("cuda:0", "cuda:1")
    mine, theirs = mp.get_context("spawn").Pipe()
    child = mp.get_context("spawn").Process(target=_serve, args=(theirs, there, layers, rows, row_bytes), daemon=True)
    child.start()
    cache = _Cache("here", here, layers, rows, row_bytes)
    if not mine.poll(START_S):
        raise TimeoutError(f"the other process was not ready within {START_S:g} s")
    metadata, *remote = mine.recv()
    agent, peer = cache.agent, cache.agent.add_remote_agent(metadata)
    rng, blocks = np.random.default_rng(0), rows // layers
    local_ids, remote_ids = (
        (np.arange(layers)[:, None] * cache.blocks + rng.permutation(cache.blocks)[:blocks]).ravel() for _ in range(2)
    )

    def listed(ids: Any, address: int, number: int) -> Any:
        return np.column_stack(
            (address + ids * row_bytes, np.full(len(ids), row_bytes), np.full(len(ids), number))
        ).astype(np.uint64)

    def strided(address: int, number: int) -> Any:
        first = address + np.arange(layers) * cache.blocks * row_bytes
        rest = np.tile([row_bytes, number, row_bytes, cache.blocks], (layers, 1))
        return np.column_stack((first, rest)).astype(np.uint64)

    def request() -> Any:
        local = agent.get_xfer_descs(listed(local_ids, *cache.where()), cache.segment)
        return agent.initialize_xfer(
            "READ", local, agent.get_xfer_descs(listed(remote_ids, *remote), cache.segment), peer
        )

    found: dict[str, dict[str, float]] = {"listed": {"setup_us": 0.0}}
    make: dict[str, Callable[[], Any]] = {"listed": request}
    every = np.arange(layers * cache.blocks)
    for name, sides in (
        ("prepared", (listed(every, *cache.where()), listed(every, *remote))),
        ("strided", (strided(*cache.where()), strided(*remote))),
    ):
        begun = time.perf_counter()
        handles = [agent.prep_xfer_dlist(who, side, cache.segment) for who, side in zip(("", peer), sides, strict=True)]
        found[name] = {"setup_us": round(1e6 * (time.perf_counter() - begun), 1)}

        def indexed(handles: Any = handles) -> Any:
            ids = local_ids.astype(np.int32), remote_ids.astype(np.int32)
            return agent.make_prepped_xfer("READ", handles[0], ids[0], handles[1], ids[1])

        make[name] = indexed

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in make}
    for number in range(repeat + 2):
        for name, one in make.items():
            begun = time.perf_counter()
            handle = one()
            made = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL could not move {rows} rows, which were {name}: {state}")
            if number >= 2:
                taken[name].append((made - begun, time.perf_counter() - made))
            agent.release_xfer_handle(handle)
    for name, times in taken.items():
        for part, seconds in zip(("make_us", "move_us"), zip(*times, strict=True), strict=True):
            found[name][part] = round(1e6 * statistics.median(seconds), 1)
    mine.send(None)
    child.join(5)
    return {"device": device, "rows": rows, "row_bytes": row_bytes, "repeat": repeat, **found}


def descriptors(
    device: Annotated[str, typer.Option(help="Memory of both caches: cpu, or cuda for the first two GPUs.")] = "cpu",
    layers: Annotated[int, typer.Option(min=1, help="Layers of each cache.")] = 32,
    rows: Annotated[
        list[int], typer.Option(min=1, help="Rows of a transfer, a multiple of --layers; may be repeated.")
    ] = [512, 4096, 16384],  # noqa: B006
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a row.")] = 4096,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds that count, after two that warm up.")] = 30,
) -> None:
    """Compare NIXL's ways to name the rows of a transfer: listed each time, prepared once, or prepared with strides.

    Prints one JSON object per line.
    """
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"must be cpu or cuda, not {device!r}", param_hint="--device")
    for number in rows:
        if number % layers:
            raise typer.BadParameter(f"must be a multiple of {layers}, not {number}", param_hint="--rows")
        typer.echo(json.dumps(name_rows(device, layers, number, row_bytes, repeat)))
