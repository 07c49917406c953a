"""What two GPUs do at best with packed pieces: all of them enqueued ahead, so that no host is in the way.

A prompt of the Llama-3-8B shape is packed on one GPU piece by piece, brought to the other and unpacked there, in one process, with
streams that wait for each other's events only. ``by``: NCCL's messages, or copies by a copy engine, which is how UCX and NIXL
move long runs between two GPUs of a host. Prints a JSON object for each of four ways: moving alone, with packing before it, with
unpacking behind it, and with both: GB/s (1e9 bytes) of three rounds, from the first piece's start to the last one's end. ``both``
is about what a back end that stages can have at best. ``share``: multiprocessors for each program of the packing kernel.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import nccl.core as nccl
import torch
from cuda.bindings import runtime
from nccl.bindings import nccl as bindings

from kvxfer import memory
from kvxfer.geometry import CopyPlan, Planner, ShardAssignment
from kvxfer.memory.cuda import launch
from kvxfer.memory.fence import DeviceEvent
from kvxfer_bench.transfer.shapes import MODELS, Pool, Request

AHEAD = 40_000_000
"""Clock cycles for which the streams sleep first, some 20 ms, in which the host gets ahead."""


@dataclass
class Side:
    """One GPU: ``rank`` 0 sends."""

    rank: int
    pool: Pool
    pieces: list[CopyPlan]
    space: memory.Space
    staged: memory.Space
    wire: Any = field(init=False)
    comm: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        torch.cuda.set_device(self.rank)
        self.wire = torch.cuda.Stream(self.rank)

    def open(self, unique_id: Any, channels: int) -> None:
        """Blocks until the other side does so, too, on a thread of its own."""
        torch.cuda.set_device(self.rank)
        self.comm = nccl.Communicator.init(2, self.rank, unique_id, nccl.NCCLConfig(blocking=True, max_ctas=channels))
        self.move(0, 1 << 20)
        self.wire.synchronize()

    def wait(self, *events: Any) -> None:
        """Let what is enqueued from now on wait for these.

        Makes this side's GPU the current one.
        """
        torch.cuda.set_device(self.rank)
        for event in events:
            self.wire.wait_event(event)

    def move(self, at: int, nbytes: int) -> Any:
        """Send or receive; the event of its end."""
        act = bindings.recv if self.rank else bindings.send
        handle = bindings.Comm(self.comm.ptr)
        act(self.staged.region.address + at, nbytes, int(nccl.UINT8), 1 - self.rank, handle, self.wire.cuda_stream)
        return self.wire.record_event()

    def copy(self, other: Side, at: int, nbytes: int) -> Any:
        """To the same place over there; the event of its end."""
        here, there = (each.staged.region.address + at for each in (self, other))
        (error,) = runtime.cudaMemcpyPeerAsync(there, other.rank, here, self.rank, nbytes, self.wire.cuda_stream)
        if error != runtime.cudaError_t.cudaSuccess:
            sys.exit(f"cudaMemcpyPeerAsync: {error}")
        return self.wire.record_event()


def side(rank: int, request: Request, piece: int, slots: int) -> Side:
    """Return one of the two GPUs with a cache and staging memory."""
    model = MODELS["llama-3-8b"]
    pool = Pool(model, request.blocks, f"cuda:{rank}")
    pool.fill()
    cache = pool.cache
    assignment = ShardAssignment(0, 0, cache.views[0].layers, 0, model.heads)
    plan = Planner(cache, cache, [assignment]).plan(
        (request.src,), (request.dst,), 0, len(request) * model.block_tokens
    )
    staged = memory.allocate(piece * slots, f"cuda:{rank}")
    return Side(rank, pool, list(plan.split(piece)), memory.space(cache.regions), staged)


def go(sender: Side, receiver: Side, by: str, piece: int, slots: int, pack: bool, unpack: bool) -> float:
    """Move all pieces once; return GB/s."""
    for each in (sender, receiver):
        torch.cuda.set_device(each.rank)
        torch.cuda.synchronize()
        with torch.cuda.stream(each.wire):
            torch.cuda._sleep(AHEAD)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(receiver.wire)
    awake = receiver.wire.record_event()
    sender.wait(awake)
    sent: list[Any] = []
    taken: list[memory.Fence] = []
    for i, (out, back) in enumerate(zip(sender.pieces, receiver.pieces, strict=True)):
        at = i % slots * piece
        torch.cuda.set_device(sender.rank)
        if pack:
            before = DeviceEvent(sent[i - slots] if i >= slots else awake)
            sender.wait(sender.space.pack(out, sender.staged, at, before).event)
        free = [taken[i - slots].event] if i >= slots else []  # what lay there before has been unpacked
        if by == "copy":
            sender.wait(*free)
            sent.append(sender.copy(receiver, at, out.nbytes))
            come = DeviceEvent(sent[-1])
        else:
            sent.append(sender.move(at, out.nbytes))
            receiver.wait(*free)
            come = DeviceEvent(receiver.move(at, back.nbytes))
        torch.cuda.set_device(receiver.rank)
        taken.append(receiver.space.unpack(back, receiver.staged, at, come) if unpack else come)
    receiver.wait(taken[-1].event)
    end.record(receiver.wire)
    for each in (sender, receiver):
        torch.cuda.synchronize(each.rank)
    seconds = float(begin.elapsed_time(end)) / 1e3
    return sum(p.nbytes for p in sender.pieces) / seconds / 1e9


def connect(sides: list[Side], channels: int) -> None:
    """Make the communicator of the two sides."""
    unique_id = nccl.get_unique_id()
    threads = [threading.Thread(target=each.open, args=(unique_id, channels), daemon=True) for each in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        if thread.is_alive():
            sys.exit("the two GPUs are not connected after 60 s")


def measure(by: str, tokens: int, piece_mib: int, slots: int, channels: int, share: int | None) -> None:
    """Print four rows; see above. ``share`` of ``None``: as it is."""
    launch._SHARE = share or launch._SHARE
    said = {
        "by": by,
        "tokens": tokens,
        "piece_mib": piece_mib,
        "slots": slots,
        "channels": channels,
        "share": launch._SHARE,
    }
    piece, request = piece_mib << 20, Request(MODELS["llama-3-8b"], tokens)
    sides = [side(rank, request, piece, slots) for rank in range(2)]
    if by == "nccl":
        connect(sides, channels)
    else:
        for each in sides:
            torch.cuda.set_device(each.rank)
            runtime.cudaDeviceEnablePeerAccess(1 - each.rank, 0)  # may be so already
    for name, ways in (
        ("alone", (False, False)),
        ("packing", (True, False)),
        ("unpacking", (False, True)),
        ("both", (True, True)),
    ):
        rounds = [go(sides[0], sides[1], by, piece, slots, *ways) for _ in range(4)]
        print(json.dumps({"moving": name, "GB_per_s": [round(r) for r in rounds[1:]], **said}), flush=True)
