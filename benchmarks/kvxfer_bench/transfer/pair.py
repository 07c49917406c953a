"""Two processes that move a request's blocks between them, and what a round costs."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.block_table import Ints
from kvxfer.cli.host import check_memory
from kvxfer.data.policy import default_staging
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.memory import devices_of
from kvxfer.protocol.values import Role
from kvxfer.testing.remote import Remote
from kvxfer_bench.transfer.engine import BenchEngine, Setup
from kvxfer_bench.transfer.shapes import Memory, Model


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

    def move(self, src: Ints, dst: Ints, rounds: int = 1, pause: float = 0.0) -> tuple[list[float], dict[str, Any]]:
        """Move the blocks with the back end, pausing for ``pause`` seconds before each round.

        Returns:
            The time of each round, and what the producer reports about the last.
        """
        with self.pipe() as (one, two):
            self.producer.send("move", src, dst, one, rounds, pause)
            self.consumer.send("move", src, dst, two, rounds, pause)
            ours, theirs = self.answers()
        return [span(*sides) for sides in zip(ours, theirs, strict=True)], ours[-1]

    @contextmanager
    def pipe(self) -> Iterator[tuple[Connection, Connection]]:
        """Connect the two sides by a pipe."""
        one, two = mp.get_context("spawn").Pipe()
        with one, two:
            yield one, two

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
    backend: str,
    options: dict[str, Any],
    model: Model,
    blocks: int,
    where: tuple[str, str],
    staging_bytes: int | None,
    memory: Memory = "plain",
    step_ms: float = 0.0,
    engine: type[BenchEngine] = BenchEngine,
) -> Iterator[Pair]:
    """Start two processes, each with a cache of ``blocks`` blocks, on the devices ``where``, in memory of one kind.

    ``step_ms``: milliseconds of Python that each runs per step meanwhile. ``engine``: what runs in each of them.
    """
    with ExitStack() as stack:
        made = []
        roles: tuple[Role, Role] = ("producer", "consumer")
        for role, device in zip(roles, where, strict=True):
            setup = Setup(role, backend, options, model, blocks, device, staging_bytes, memory, step_ms)
            made.append(Remote(role, engine, setup))
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


def check_room(where: tuple[str, str], model: Model, tokens: int, staging_bytes: int | None, pairs: int = 1) -> None:
    """Refuse a prompt for which there is no room in ``pairs`` pairs of caches with their staging memory.

    Raises:
        ConfigError: There is too little memory.
    """
    cache = model.cache_blocks(tokens) * model.page * model.layers
    check_memory(where, pairs * (cache + (staging_bytes or default_staging(where[0]))), f"--tokens {tokens}")


def span(*sides: dict[str, float]) -> float:
    """Return the seconds of a round, from when the later side began to when the later one was done."""
    return max(s["done"] for s in sides) - max(s["begun"] for s in sides)
