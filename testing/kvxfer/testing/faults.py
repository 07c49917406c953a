"""Faults around any back end, chosen in the configuration: loss, delay, a slow link, failure, death, wrong bytes.

``{"backend": "kvxfer.testing.faults:Faulty", "backend_options": {"inner": "tcp", "lose": 0.01}}``

Bytes are corrupted where they arrive (READ and RECV), after the inner back end has reported success. ``Zeroing`` is the
negative control for any check that claims to compare KV: it must fail. Delays are made with fences, so that the inner back
end does the waiting, and ends it, in its own way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from kvxfer import clock, memory
from kvxfer.backend.options import BackendOptions
from kvxfer.errors import ConfigError, TransportError
from kvxfer.testing.wrapper import Wrapper
from kvxfer.transport.contract import Batch, Capabilities, Completion, Fence, PlanBatch, Quieted, Verb

__all__ = ["Faulty", "Options", "Zeroing"]

Chance = Annotated[float, Meta(ge=0, le=1)]
ARRIVING = (Verb.READ, Verb.RECV)


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of ``Faulty``.

    Attributes:
        inner: The back end that does the work.
        inner_options: Its options.
        lose: Probability that a batch never begins, and so never ends by itself.
        fail: Probability that a batch ends in an error before it begins.
        corrupt: Probability that one byte of those that a batch brought is flipped.
        zero_block: Whether the longest run that a batch brought is zeroed.
        delay_s: Seconds by which every batch begins later.
        bytes_per_s: Speed of this side's link, which moves one batch after the other; each arrives when its last byte would.
        die_after: The number of successful batches after which the inner back end is closed and ``poll`` returns nothing more.
        seed: Seed of the random choices.
    """

    backend = "faulty"

    inner: str = "tcp"
    inner_options: dict[str, Any] = {}
    lose: Chance = 0.0
    fail: Chance = 0.0
    corrupt: Chance = 0.0
    zero_block: bool = False
    delay_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    die_after: Annotated[int, Meta(ge=1)] | None = None
    seed: int = 0


class _Gate:
    """A fence that passes once another one has and a time has come; the time is asked for when the other has passed."""

    event = None

    def __init__(self, after: Fence | None, due: Callable[[], float]) -> None:
        self._after, self._ask, self._due = after, due, None if after is not None else due()

    @property
    def left_s(self) -> float:
        """The seconds that are left; infinite if the other fence has not passed."""
        return math.inf if self._due is None else max(self._due - clock.now(), 0.0)

    def passed(self) -> bool:
        if self._due is None and (self._after is None or self._after.passed()):
            self._due = self._ask()
        return self._due is not None and clock.now() >= self._due


class Faulty(Wrapper):
    """A back end that misbehaves as ``Options`` says, and otherwise does what its inner back end does."""

    name = "faulty"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        """Make it around an inner back end.

        Raises:
            ConfigError: An option is unknown or bad, or bytes are to be corrupted and the inner back end only writes.
        """
        self._options = Options.parse(options)
        super().__init__(agent, self._options.inner, self._options.inner_options)
        self._random = random.Random(self._options.seed)
        self._running: dict[int, Batch] = {}
        self._slow: dict[int, _Gate] = {}  # those of them that the link's speed holds back
        self._failing: set[int] = set()
        self._succeeded = 0
        self._dead = False
        self._free = 0.0  # when the link will have moved all batches so far
        if not self.capabilities.verbs:
            self.inner.close()
            raise ConfigError(
                f"back end {self._options.inner!r} only writes, and bytes can be corrupted only where READ or RECV brings them in"
            )

    @property
    def capabilities(self) -> Capabilities:
        inner = self.inner.capabilities
        spoils = self._options.corrupt or self._options.zero_block
        # The bytes to corrupt are found by their runs, so the inner back end must get runs, not plans.
        return replace(inner, factored=False, verbs=inner.verbs - {Verb.WRITE} if spoils else inner.verbs)

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        if isinstance(batch, PlanBatch):
            raise TransportError("back end 'faulty' takes no plans: it needs runs to find the bytes that arrive")
        lost, failed = (self._random.random() < chance for chance in (self._options.lose, self._options.fail))
        if lost or failed:
            after = _Gate(after, lambda: math.inf)
        elif self._options.delay_s or self._options.bytes_per_s:
            soonest = clock.now() + self._options.delay_s
            after = _Gate(after, lambda: max(soonest, self._sent(batch)))
        number = self.inner.submit(batch, after)
        self._running[number] = batch
        if self._options.bytes_per_s and batch.verb is not Verb.RECV and isinstance(after, _Gate):
            self._slow[number] = after
        if failed:
            self._failing.add(number)
            self.inner.abort(number)
        return number

    def bytes_moved(self, batch: int) -> int:
        if batch not in self._slow:
            return self.inner.bytes_moved(batch)
        assert self._options.bytes_per_s is not None
        nbytes = self._running[batch].nbytes
        return max(nbytes - math.ceil(min(self._slow[batch].left_s * self._options.bytes_per_s, nbytes)), 0)

    def _sent(self, batch: Batch) -> float:
        """Return when the link will have moved this batch as well; of SEND and RECV, only the SEND uses the link."""
        if self._options.bytes_per_s is None or batch.verb is Verb.RECV:
            return 0.0
        self._free = max(self._free, clock.now()) + batch.nbytes / self._options.bytes_per_s
        return self._free

    def poll(self) -> list[Completion | Quieted]:
        if self._dead:
            return []
        words = [self._reword(word) if isinstance(word, Completion) else word for word in self.inner.poll()]
        for done in words:
            if isinstance(done, Quieted):
                continue
            batch = self._running.pop(done.batch)
            self._slow.pop(done.batch, None)
            if done.error is None:
                self._succeeded += 1
                if batch.verb in ARRIVING:
                    self._spoil(batch)
        if self._options.die_after is not None and self._succeeded >= self._options.die_after:
            self._dead = True
            self.inner.close()
        return words

    def fileno(self) -> int | None:
        return None if self._dead else self.inner.fileno()

    def _reword(self, done: Completion) -> Completion:
        """Say so in the error if this object aborted the batch."""
        if done.batch not in self._failing:
            return done
        self._failing.remove(done.batch)
        return replace(done, error=TransportError(f"{done.error} (this back end was told to let it fail)"))

    def _spoil(self, batch: Batch) -> None:
        """Corrupt what a batch brought, as the options say."""
        if not batch.nbytes:
            return
        run = int(batch.lengths.argmax())
        length = int(batch.lengths[run])
        held = memory.space(self.memories.regions(batch.local))
        region, at = held.locate(int(batch.local_offsets[run]), length)
        if self._options.zero_block:
            held.scatter(region, np.array([at]), np.zeros((1, length), np.uint8))
        if self._random.random() < self._options.corrupt:
            byte, middle = np.empty((1, 1), np.uint8), np.array([at + length // 2])
            held.gather(region, middle, byte)
            held.scatter(region, middle, ~byte)


class Zeroing(Faulty):
    """``Faulty`` with ``zero_block``: of what arrives, the longest run (a block of at least one layer) is zero."""

    name = "zeroing"

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, {**options, "zero_block": True})
