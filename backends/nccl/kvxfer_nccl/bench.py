"""``kvxfer bench pieces``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvxfer.errors import ConfigError

__all__ = ["pieces"]


def pieces(
    by: Annotated[str, typer.Option(help="What moves them: nccl, or copy (a copy engine).")] = "nccl",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the request, of the Llama-3-8B shape.")] = 32768,
    piece_mib: Annotated[int, typer.Option(min=1, help="MiB of a piece.")] = 128,
    slots: Annotated[int, typer.Option(min=1, help="Staging slots of each side.")] = 4,
    channels: Annotated[int, typer.Option(min=1, help="Of NCCL.")] = 24,
    share: Annotated[int | None, typer.Option(help="Multiprocessors for each program of the packing kernel.")] = None,
) -> None:
    """Measure what two GPUs do at best with packed pieces, all enqueued ahead, so that no host is in the way.

    A JSON object a line: GB/s (1e9 bytes) of moving alone, with packing before it, with unpacking behind it, and with both.
    """
    if by not in ("nccl", "copy"):
        raise ConfigError(f"pieces are moved by nccl or by copy, not by {by!r}")
    import torch

    if torch.cuda.device_count() < 2:
        raise ConfigError(f"pieces go from one GPU to another; this process sees {torch.cuda.device_count()}")
    from kvxfer_nccl.pieces import measure

    measure(by, tokens, piece_mib, slots, channels, share)
