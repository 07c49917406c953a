"""``kvxfer bench cuda-ipc``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvxfer.errors import ConfigError

__all__ = ["cuda_ipc"]


def cuda_ipc(
    seconds: Annotated[float, typer.Option(help="Start no further section after this many seconds.")] = 200.0,
    producer: Annotated[
        int | None, typer.Option(help="Index of the producer's GPU. [default: the second, if there is one]")
    ] = None,
    consumer: Annotated[int, typer.Option(help="Index of the consumer's GPU.")] = 0,
) -> None:
    """Measure the kernel of back end cuda_ipc between two GPUs or within one, by size, layout, thread blocks and other GPU load.

    Prints one JSON object per line, and fails if a byte was wrong or a section failed. GB are 1e9 bytes of KV; of_link compares with
    a plain copy of 1 GiB between the two GPUs.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a GPU; this process sees none")
    from kvxfer_bench.cuda_ipc.measuring import measure

    measure(seconds, producer, consumer)
