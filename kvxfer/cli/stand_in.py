"""An engine without a model, for measuring a link: `kvxfer doctor --stand-in` on one host, `--peer` on the other.

A running engine is never measured, because its memory and its links belong to its requests. A stand-in has memory of its own but
is otherwise an engine, with the same settings, back ends, key and addresses. Each side offers and fetches, one after the other. The
visitor announces each transfer to the stand-in's directory with ``Await``; the transfer's name tells the stand-in how many blocks to
give, or to take from the visitor.
"""

from __future__ import annotations

import json
import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.geometry import HOST, Cache, Group, View
from kvxfer.identity import FIRST, Handle, Source, TransferId
from kvxfer.logs import logger
from kvxfer.memory import allocate
from kvxfer.protocol.messages import Await, Named
from kvxfer.protocol.values import Ended, Released
from kvxfer.settings import loopback
from kvxfer.values import BlockTable, Fetch, Offer

log = logger("kvxfer.doctor")

NAME = "kvxfer-stand-in"
"""The engine's name, by which a visitor knows it."""
BLOCK, BLOCKS = 64 << 10, 1024
DIGEST = b"measured"
ROUNDS = 5
"""Measured transfers of each size in each direction, after one that warms up."""
LONG_S = 4.0
"""After this time no further round of the same size and direction is begun. A transfer is made longer while it takes less than a
quarter of it."""
TRANSFER_S = 20.0
"""After this time a transfer fails."""
MAX_ASKED = 1000
"""Announced transfers that a stand-in keeps until it gets to them."""


class _Half:
    """An agent with a cache that no request uses, and its directory. What it offers and what it fetches lie in halves of that cache."""

    def __init__(self, config: Config, name: str, device: str, seconds: float) -> None:
        self._longest = 2 * seconds
        config = msgspec.structs.replace(config, transfer_timeout=seconds, lease=seconds)
        self._space = allocate(2 * BLOCKS * BLOCK, device)
        view = View("kv", 0, ("0",), (0,), 2 * BLOCKS, BLOCK, BLOCK, "bytes")
        self.agent = Agent(Cache((self._space.region,), (Group(1),), (view,)), config, name, {})
        try:
            self.directory = Directory(config, name, {}, epoch=self.agent.epoch)
            self.directory.publish((self.agent.descriptor,))
        except BaseException:
            self.agent.close()
            raise

    def offer(self, transfer: TransferId, blocks: int, payload: bytes = b"") -> None:
        self.agent.offer(Offer(transfer, DIGEST, FIRST, blocks, _table(blocks), True, payload=payload))

    def fetch(self, transfer: TransferId, blocks: int, source: Source) -> Ended:
        """Fetch a transfer, and return how it ended once its blocks may be used again.

        Raises:
            KvxferError: It does not end.
        """
        self.agent.fetch(Fetch(Handle(str(transfer)), transfer, DIGEST, source, _table(blocks, BLOCKS), 0, blocks))
        until, ended = time.monotonic() + self._longest, None
        while time.monotonic() < until:
            for event in self.agent.events(0.1):
                if isinstance(event, Ended) and event.transfer == transfer:
                    ended = event
                if ended is not None and isinstance(event, Released) and event.transfer == transfer:
                    return ended
        raise KvxferError(f"transfer {transfer} did not end within {self._longest:g} s")

    def close(self) -> None:
        self.directory.close()
        self.agent.close()


def _table(blocks: int, first: int = 0) -> BlockTable:
    """Return this many blocks, scattered over half of the cache: 389 and 1024 have no common divisor."""
    return BlockTable.of([[first + i * 389 % BLOCKS for i in range(blocks)]])


class StandIn:
    """An engine that gives and takes what visitors ask for. It listens once it is made, and works in ``serve``.

    Raises:
        ConfigError: Strangers could reach it.
        KvxferError: The back end or the memory is not available.
        OSError: It cannot listen at the address.
    """

    def __init__(self, config: Config, device: str = HOST) -> None:
        if config.key_file is None and not loopback(config.listen):
            raise ConfigError(
                f"a stand-in connects to any address that it is asked to, so to listen on {config.listen} it needs a 'key_file', and "
                "so do its visitors"
            )
        self._asked: queue.Queue[TransferId] = queue.Queue(MAX_ASKED)
        self._took: dict[int, list[float | str]] = {}  # by visitor: seconds of what was taken, or why it was not
        self._half = _Half(config, NAME, device, TRANSFER_S)
        self._half.directory.begun = self._note
        self.source = self._half.directory.source

    def _note(self, transfer: TransferId, digest: bytes) -> bool:
        """On the directory's thread."""
        try:
            self._asked.put_nowait(transfer)
        except queue.Full:
            log.warning("more transfers are asked for than a stand-in queues; %s is dropped", transfer)
        return False

    def serve(self, seconds: float) -> None:
        """Do what visitors ask for, and return after about this many seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                transfer = self._asked.get(timeout=left)
            except queue.Empty:
                return
            self._half.agent.events()  # nobody needs to know how the transfers that were given ended
            try:
                self._do(transfer)
            except (ValueError, KvxferError) as e:
                log.warning("a stand-in cannot do what %s asks for: %s", transfer, e)

    def _do(self, transfer: TransferId) -> None:
        _, epoch, words = transfer.base.split("/", 2)
        what, count, *where = words.split(" ")
        visitor, blocks = int(epoch, 16), min(max(int(count), 1), BLOCKS)
        if what == "give":
            told = json.dumps(self._took.pop(visitor, [])).encode()
            self._half.offer(transfer, blocks, told)
            return
        if what != "take":
            raise ValueError(f"it can only give and take, not {what!r:.40}")
        host, port = where
        end = self._half.fetch(transfer, blocks, Source(host, int(port), visitor))
        self._took = {visitor: self._took.get(visitor, [])}
        self._took[visitor].append(
            end.seconds - end.waited if end.outcome.failure is None else end.outcome.failure.detail
        )

    def close(self) -> None:
        """End the directory and the agent."""
        self._half.close()


def measure(stand_in: Source, config: Config, device: str) -> dict[str, Any]:
    """Measure the link to a stand-in, given its directory, with this side's memory on ``device``. Blocks.

    Returns:
        For each direction (``from_peer``, ``to_peer``) the medians: ``GB_per_s`` of a long transfer, ``ms`` of a short one, and the
        ``bytes`` of both; or the ``failure``.
    """
    # Twice the time, because the stand-in may first have to fetch what it then reports on.
    half = _Half(msgspec.structs.replace(config, port=0), "doctor", device, 2 * TRANSFER_S)
    own = half.directory.source
    numbers = iter(range(1 << 20))

    def give(blocks: int) -> Ended:
        transfer = TransferId.mint(own.epoch, f"give {blocks}", next(numbers))
        half.directory.tell(stand_in, Await(stand_in.epoch, (Named(transfer, DIGEST),)))
        return half.fetch(transfer, blocks, stand_in)

    def taken(blocks: int) -> float:
        end = give(blocks)
        if end.outcome.failure is not None:
            raise KvxferError(end.outcome.failure.detail)
        return end.seconds - end.waited

    def handed(blocks: int) -> float:
        transfer = TransferId.mint(own.epoch, f"take {blocks} {own.host} {own.port}", next(numbers))
        half.offer(transfer, blocks)
        half.directory.tell(stand_in, Await(stand_in.epoch, (Named(transfer, DIGEST),)))
        [took] = json.loads(give(1).payload or "[]") or ["it reported nothing"]
        if isinstance(took, str):
            raise KvxferError(f"the peer could not fetch from here: {took}")
        return float(took)

    try:
        return {"from_peer": _figures(taken), "to_peer": _figures(handed)}
    finally:
        half.close()


def _figures(move: Callable[[int], float]) -> dict[str, Any]:
    """Return the figures of one direction. How long the long transfer is follows from the pace of shorter ones."""
    try:
        short = took = _median(move, 1)
        blocks = 1
        while blocks < BLOCKS and took < LONG_S / 4:
            blocks = min(8 * blocks, BLOCKS)
            took = min(move(blocks), move(blocks))  # the first one touches new memory, and either may be held up
        long = _median(move, blocks) if blocks > 1 else short
        return {
            "GB_per_s": float(f"{blocks * BLOCK / long / 1e9:.3g}"),
            "ms": round(1e3 * short, 3),
            "bytes": [blocks * BLOCK, BLOCK],
        }
    except KvxferError as e:
        return {"failure": str(e)}


def _median(move: Callable[[int], float], blocks: int) -> float:
    begun = time.monotonic()
    took = [move(blocks)]
    while len(took) <= ROUNDS and time.monotonic() < begun + LONG_S:
        took.append(move(blocks))
    return statistics.median(took[1:] or took)
