"""What a back end tells of a batch that is on its way."""

from __future__ import annotations

import numpy as np

from kvxfer.geometry import Runs
from kvxfer.testing.conformance.fences import HostFence
from kvxfer.testing.conformance.participant_link import TransferMode
from kvxfer.testing.conformance.suite import Suite, World
from kvxfer.testing.participant import LocalParticipant

NBYTES, RUNS = 64 << 20, 512
AHEAD = 32 << 20
"""Bytes that the target's system has taken count as moved, although the target's memory does not have them yet."""


class Tellings(Suite):
    """Clauses about ``bytes_moved``."""

    def test_what_is_told_has_moved(self, world: World, way: TransferMode) -> None:
        """What ``bytes_moved`` tells of a batch has moved, is never less than before, and is never more than the batch has.

        An operator reads it as the reason why a load was late. To tell 0 is right at any time; count what your library says has ended.
        """
        a, b = world.local(), world.other()
        a.allocate([NBYTES], 9)
        b.allocate_untouched([NBYTES])
        link, fence, each = world.link(a, b), HostFence(), NBYTES // RUNS
        places = np.random.default_rng(11).permutation(RUNS) * each
        runs = Runs.of(places, places[::-1].copy(), np.full(RUNS, each))
        fenced = {p.name: fence for p in (a, b) if isinstance(p, LocalParticipant)}
        started = link.start(way, a, b, runs, fences=fenced)
        for _ in range(2):
            for participant, number in started.halves:
                told = participant.bytes_moved(number)
                assert told == 0 or participant.name not in fenced, f"{told} bytes are told of before the fence"
            world.run(0.02)
        fence.open = True
        a.withdraw(a.endpoint())  # so that it is polled
        before = dict.fromkeys(started.halves, 0)

        def looked() -> bool:
            for half in started.halves:
                participant, number = half
                told, was = participant.bytes_moved(number), before[half]
                if participant.result(number) is not None or told == was:
                    continue
                assert was < told <= NBYTES, f"{told} bytes of {NBYTES} are told of, after {was}"
                come = np.count_nonzero(b.read(0, 0, NBYTES))
                assert told <= come + AHEAD, f"{told} bytes are told of, and {come} have come"
                before[half] = told
            return started.over()

        world.wait_for(looked, "a batch of 64 MiB")
        world.succeed(started)
        for participant, number in started.halves:
            assert 0 <= participant.bytes_moved(number) <= NBYTES, "of a batch that has ended"
