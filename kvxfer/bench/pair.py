"""Two processes between which a request's blocks are moved: what one round costs, by the back end and by its library."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvxfer.bench.party import Party, Setup
from kvxfer.bench.remote import Remote
from kvxfer.bench.shapes import Model
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.geometry.plan import Ints

__all__ = ["Pair", "devices", "pair"]


class Pair:
    """``producer`` and ``consumer``: see ``Party`` for what they can be asked. Times are in seconds, from when the later one
    began to when the later one was done."""

    def __init__(self, producer: Remote, consumer: Remote) -> None:
        self.producer, self.consumer = producer, consumer

    def connect(self) -> str:
        """Data threads of their own on both sides, and a link between them; how parts go on it."""
        p, d = self.producer, self.consumer
        ends = p("open_mover"), d("open_mover")
        p.send("connect", ends[1])
        d("connect", ends[0])
        return str(p.get())

    def move(self, src: Ints, dst: Ints) -> tuple[float, dict[str, Any]]:
        """One round by the back end; the time, and what the producer says of it."""
        p, d = self.producer, self.consumer
        caches = p("cache"), d("cache")
        one, two = mp.get_context("spawn").Pipe()
        p.send("move", src, dst, caches[1], one)
        d.send("move", src, dst, caches[0], two)
        ours, theirs = self._both()
        one.close()
        two.close()
        return _span(ours, theirs), ours

    def connect_raw(self) -> bool | None:
        """The same for the library; whether both sides take part in a round, ``None`` where there is no library."""
        p, d = self.producer, self.consumer
        theirs, ours = d("open_raw"), p("open_raw")
        if ours is None or theirs is None:
            return None
        p.send("connect_raw", theirs)
        d("connect_raw", ours)
        return bool(p.get())

    def move_raw(self, src: Ints, dst: Ints, scattered: bool, both: bool) -> tuple[float, int]:
        """One round by the library, with a message or descriptor a run (``scattered``) or one for all bytes; the time and
        the number of runs."""
        p, d = self.producer, self.consumer
        caches = p("cache"), d("cache")
        if both:
            p.send("move_raw", src, dst, caches[1], scattered)
        d.send("move_raw", src, dst, caches[0], scattered)
        sides = self._both() if both else (d.get(),)
        return _span(*sides), int(sides[-1]["runs"])

    def expect(self, dst: Ints, src: Ints, what: str) -> None:
        """Raises ``KvxferError`` unless the consumer's blocks are the producer's."""
        if not self.consumer("matches", dst, src):
            raise KvxferError(f"the {what} run delivered wrong bytes")

    def _both(self) -> tuple[Any, Any]:
        """Both answers; when both fail, both reasons."""
        try:
            ours = self.producer.get()
        except KvxferError as first:
            try:
                self.consumer.get()
            except KvxferError as second:
                raise KvxferError(f"{first}; {second}") from None
            raise
        return ours, self.consumer.get()


@contextmanager
def pair(
    backend: str, options: dict[str, Any], model: Model, blocks: int, where: tuple[str, str], staging_bytes: int
) -> Iterator[Pair]:
    """Two processes with a cache of ``blocks`` each, on the devices ``where``."""
    with ExitStack() as stack:
        made = []
        for role, device in zip(("producer", "consumer"), where, strict=True):
            made.append(Remote(role, Party, Setup(role, backend, options, model, blocks, device, staging_bytes)))
            stack.callback(made[-1].close)
        yield Pair(*made)


def devices(device: str) -> tuple[str, str]:
    """Where the two caches go: on GPUs of their own, if there are two. Raises ``ConfigError`` where there is none."""
    if device == "cpu":
        return "cpu", "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


def _span(*sides: dict[str, float]) -> float:
    return max(s["done"] for s in sides) - max(s["begun"] for s in sides)
