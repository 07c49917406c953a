"""A short batch beside a long one on the same link has its turn: nobody waits for a load of a hundred thousand tokens to end."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from kvxfer.geometry import Runs
from tests.backends.conftest import way_of, world_of

RUN, LONG = 64 << 10, 160 << 20


@pytest.mark.parametrize("backend", ["cma", "tcp", "zmq"])
def test_short_batches_end_before_a_long_one_that_began_before_them(backend: str) -> None:
    with closing(world_of(backend)) as world:
        a, b = world.local(), world.local()
        for participant in (a, b):
            participant.allocate([LONG + 64 * RUN], 1)
        link = world.link(a, b)
        way = way_of(world)
        world.succeed(link.start(way, a, b, Runs.of([0], [0], [RUN])))
        where = np.random.default_rng(1).permutation(LONG // RUN) * RUN
        long = link.start(way, a, b, Runs.of(where, where, np.full(len(where), RUN)))
        ends = [LONG + 2 * i * RUN for i in range(10)]
        world.succeed(*(link.start(way, a, b, Runs.of([at], [at], [RUN])) for at in ends))
        assert not long.begun_to_end(), "short batches had to wait for the long one"
        world.succeed(long)
