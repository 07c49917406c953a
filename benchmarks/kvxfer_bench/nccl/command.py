"""``kvxfer bench pieces``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvxfer.errors import ConfigError

__all__ = ["pieces"]


def pieces(
    by: Annotated[str, typer.Option(help="What moves the pieces: nccl, or copy (a copy engine).")] = "nccl",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the request (Llama-3-8B), in tokens.")] = 32768,
    piece_mib: Annotated[int, typer.Option(min=1, help="Size of a piece, in MiB.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="Staging slots on each side.")] = 4,
    channels: Annotated[int, typer.Option(min=1, help="NCCL channels.")] = 24,
    share: Annotated[
        int | None, typer.Option(help="Multiprocessors for each program of the packing kernel. [default: as in kvxfer]")
    ] = None,
) -> None:
    """Measure how fast two GPUs can move packed pieces at best, with all work enqueued in advance so that no host slows it down.

    Prints one JSON object per line: GB/s (1e9 bytes) of moving alone, with packing before it, with unpacking after it, and with
    both.
    """
    if by not in ("nccl", "copy"):
        raise ConfigError(f"--by must be nccl or copy, not {by!r}")
    import torch

    if torch.cuda.device_count() < 2:
        raise ConfigError(f"this benchmark needs two GPUs; this process sees {torch.cuda.device_count()}")
    from kvxfer_bench.nccl.pieces import measure

    measure(by, tokens, piece_mib, slots, channels, share)
