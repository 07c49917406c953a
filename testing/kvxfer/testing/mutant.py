"""What mutants are made of: a back end around another one, which knows the batches in flight and can spoil what they bring."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

from kvxfer.backend.options import BackendOptions
from kvxfer.testing.wrapper import Wrapper
from kvxfer.transport.contract import Batch, Completion, Fence, PlanBatch, Quieted, Verb

__all__ = ["ARRIVING", "Mutant", "Spoiling"]

ARRIVING = (Verb.READ, Verb.RECV)


class Options(BackendOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a mutant: the back end ``inner`` that it is made of, and its options."""

    backend = "mutant"

    inner: str
    inner_options: dict[str, Any] = {}


class Mutant(Wrapper):
    """A back end without a defect; subclasses have one each.

    Attributes:
        found_by: The clause of the suite that must find it.
    """

    name = "mutant"
    found_by: ClassVar[str] = ""

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        parsed = Options.parse(options)
        super().__init__(agent, parsed.inner, parsed.inner_options)
        self.batches: dict[int, Batch] = {}

    def submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        assert isinstance(batch, Batch)  # the suite submits no plans
        number = super().submit(self.changed(batch), after)
        self.batches[number] = batch
        return number

    def poll(self) -> list[Completion | Quieted]:
        words: list[Completion | Quieted] = []
        for word in super().poll():
            if isinstance(word, Completion):
                words += self.ended(self.batches.pop(word.batch), word)
            else:
                words.append(word)
        return words

    def changed(self, batch: Batch) -> Batch:
        """Return what is submitted instead of a batch."""
        return batch

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        """Return what is said instead of the completion of a batch."""
        return [word]

    def spoil(self, batch: Batch) -> None:
        """Invert the first byte of the longest run on this side."""
        if batch.nbytes:
            address = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths)[batch.lengths.argmax()]
            ctypes.c_uint8.from_address(int(address)).value ^= 0xFF


class Spoiling(Mutant):
    """Spoils batches by some rule: those that bring bytes here when they have ended, and WRITEs before they begin."""

    def bad(self, batch: Batch) -> bool:
        raise NotImplementedError

    def changed(self, batch: Batch) -> Batch:
        if batch.verb is Verb.WRITE and self.bad(batch):
            self.spoil(batch)
        return batch

    def ended(self, batch: Batch, word: Completion) -> list[Completion]:
        if word.error is None and batch.verb in ARRIVING and self.bad(batch):
            self.spoil(batch)
        return [word]
