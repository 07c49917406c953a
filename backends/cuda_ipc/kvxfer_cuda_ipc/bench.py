"""``kvxfer bench cuda-ipc``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvxfer.errors import ConfigError

__all__ = ["cuda_ipc"]


def cuda_ipc(
    seconds: Annotated[float, typer.Option(help="Begin no further section after this time.")] = 200.0,
    producer: Annotated[int | None, typer.Option(help="Its GPU. [default: the second, if there is one]")] = None,
    consumer: Annotated[int, typer.Option(help="Its GPU.")] = 0,
) -> None:
    """Measure the kernel of back end cuda_ipc between two GPUs, or within one: sizes, layouts, thread blocks, a product beside it.

    A JSON object a line. GB are 1e9 bytes of KV; `of_link` compares with a plain copy of 1 GiB between the two.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("the kernel of cuda_ipc needs a GPU; this process sees none")
    from kvxfer_cuda_ipc.measuring import measure

    measure(seconds, producer, consumer)
