"""Two processes that move a request's blocks between them, and what a round costs."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvxfer.block_table import Ints
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.memory import devices_of
from kvxfer.protocol.values import Role
from kvxfer.testing.remote import Remote
from kvxfer_bench.transfer.engine import BenchEngine, Setup
from kvxfer_bench.transfer.shapes import Model


class Pair:
    """A producer and a consumer, each a ``BenchEngine`` in a process of its own.

    Times are in seconds, from when the later one began to when the later one was done.
    """

    def __init__(self, producer: Remote, consumer: Remote) -> None:
        self.producer, self.consumer = producer, consumer
        producer("know", consumer("cache"))
        consumer("know", producer("cache"))

    def connect(self) -> str:
        """Start a data thread on both sides and link them; return the mode in which parts are moved."""
        p, d = self.producer, self.consumer
        ends = p("open_data_thread"), d("open_data_thread")
        p.send("connect", ends[1])
        d("connect", ends[0])
        return str(p.get())

    def move(self, src: Ints, dst: Ints, rounds: int = 1) -> tuple[list[float], dict[str, Any]]:
        """Move the blocks with the back end.

        Returns:
            The time of each round, and what the producer reports about the last.
        """
        one, two = mp.get_context("spawn").Pipe()
        with one, two:
            self.producer.send("move", src, dst, one, rounds)
            self.consumer.send("move", src, dst, two, rounds)
            ours, theirs = self.answers()
        return [
            max(s["done"] for s in sides) - max(s["begun"] for s in sides) for sides in zip(ours, theirs, strict=True)
        ], ours[-1]

    def expect(self, dst: Ints, src: Ints, what: str) -> None:
        """Check that the consumer's blocks are the producer's.

        Raises:
            KvxferError: A byte differs.
        """
        if not self.consumer("matches", dst, src):
            raise KvxferError(f"the {what} run delivered wrong bytes")

    def answers(self) -> tuple[Any, Any]:
        """Return both answers.

        Raises:
            KvxferError: One has failed; if both have, it has both reasons.
        """
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
    backend: str, options: dict[str, Any], model: Model, blocks: int, where: tuple[str, str], staging_bytes: int | None
) -> Iterator[Pair]:
    """Start two processes, each with a cache of ``blocks`` blocks, on the devices ``where``."""
    with ExitStack() as stack:
        made = []
        roles: tuple[Role, Role] = ("producer", "consumer")
        for role, device in zip(roles, where, strict=True):
            setup = Setup(role, backend, options, model, blocks, device, staging_bytes)
            made.append(Remote(role, BenchEngine, setup))
            stack.callback(made[-1].close)
        yield Pair(*made)


def cache_devices(device: str) -> tuple[str, str]:
    """Return the devices of the two caches for a kind of device: two devices, or one for both if there is only one.

    Raises:
        ConfigError: No such device is here.
    """
    here = devices_of(device)
    if not here:
        raise ConfigError(f"--device {device}: no device of kind {device!r} is here")
    return here[0], here[min(1, len(here) - 1)]
