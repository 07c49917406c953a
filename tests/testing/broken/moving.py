"""Back ends that move too much, too little, too early or to the wrong place."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvxfer.testing import FakeTransport
from kvxfer.testing.fake import FENCE_INTERVAL_S
from kvxfer.testing.network import LinkEnd
from kvxfer.transport import Batch, Completion, Fence, Verb


class TellsEarly(FakeTransport):
    """Completes a batch before its bytes have moved."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = super().submit(batch, after)
        for side in self.links.values():
            side.posts[-1].due += 0.2
        self.completions.append(Completion(number))
        return number

    def finish(self, completion: Completion) -> None:
        pass


class MovesTooMuch(FakeTransport):
    """Rounds lengths up to eight bytes."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        return super().submit(dataclasses.replace(batch, lengths=-(-batch.lengths // 8) * 8), after)


class BelievesAnyOffset(FakeTransport):
    """Takes offsets on trust, as most libraries do."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        inside = np.clip(batch.local_offsets, 0, 100), np.clip(batch.lengths, 0, 100)
        return super().submit(dataclasses.replace(batch, local_offsets=inside[0], lengths=inside[1]), after)


class ForgetsToAskTheFence(FakeTransport):
    """Waits for the fence, but does not wake its thread to look."""

    def _next_look(self, looked: float) -> float | None:
        return None


class ForgetsTheFencesOfOthers(FakeTransport):
    """Looks at a fence only if nothing else is in flight on the link."""

    def start(self, number: int, link: LinkEnd, batch: Batch, after: Fence | None) -> None:
        super().start(number, link, batch, None if link.posts else after)


class LosesAFenceBetweenTwoQuestions(FakeTransport):
    """Asks once to begin, and asks again whether there is anything to come back for."""

    def _next_look(self, looked: float) -> float | None:
        fenced = [p for side in self.links.values() for p in side.posts if p.fenced()]
        return looked + FENCE_INTERVAL_S if fenced else None


class FailsAtRoundSizes(FakeTransport):
    """A slot that is filled to its last byte counts as too large."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = super().submit(batch, after)
        if batch.nbytes and batch.nbytes % (1 << 20) == 0:
            for side in self.links.values():
                for post in [p for p in side.posts if p.number == number]:
                    self._net.fail(post, "larger than a slot")
        return number


class TakesTheFirst65536Runs(FakeTransport):
    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        lengths = batch.lengths.copy()
        lengths[1 << 16 :] = 0
        return super().submit(dataclasses.replace(batch, lengths=lengths), after)


class CountsIn32Bits(FakeTransport):
    """Offsets and lengths pass through a field that is too short."""

    bits = 32

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        lengths, offsets = batch.lengths % (1 << self.bits), batch.local_offsets % (1 << self.bits)
        return super().submit(dataclasses.replace(batch, lengths=lengths, local_offsets=offsets), after)


class CountsIn31Bits(CountsIn32Bits):
    """And so does a sign."""

    bits = 31


class MixesUpEqualBatches(FakeTransport):
    """Above sixteen in flight, two receives of one length get each other's memory."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = super().submit(batch, after)
        posts = [p for s in self.links.values() for p in s.posts if p.batch.verb is Verb.RECV]
        if batch.verb is Verb.RECV and len(posts) > 16 and posts[-1].lengths.tolist() == posts[-2].lengths.tolist():
            posts[-1].addresses, posts[-2].addresses = posts[-2].addresses, posts[-1].addresses
        return number


class CountsStreams(FakeTransport):
    """Takes the number of a stream for a count of batches."""

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        counts = self.__dict__.setdefault("counts", {})
        expected = counts.get((batch.peer, batch.verb), batch.stream)
        number = super().submit(batch, after)
        counts[batch.peer, batch.verb] = expected + 1
        if batch.verb is Verb.RECV and batch.stream != expected:
            self.stop(number, self.link(batch.peer))
        return number
