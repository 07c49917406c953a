"""A process with both ends of a link over a back end, which says which of its sockets a program gets that it starts.

Usage: ``python -m tests.backends.inheriting BACKEND OPTIONS``, the options as JSON. Each back end has a process of its own,
since not all of them can share one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

from kvxfer.geometry import Runs
from tests.backends.conftest import way_of, world_of

LIST = """
import os
for fd in os.listdir("/proc/self/fd"):
    try:
        print(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass
"""


def inherited() -> set[str]:
    """The sockets that a child has from this process."""
    done = subprocess.run([sys.executable, "-c", LIST], close_fds=False, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\n") if name.startswith("socket:")}


if __name__ == "__main__":
    backend, options = sys.argv[1:]
    before = inherited()
    with closing(world_of(backend, **json.loads(options))) as world:
        a, b = world.local(), world.local()
        world.allocate(a, b)
        world.move(world.link(a, b), way_of(world), a, b, Runs.of([0], [0], [1 << 20]))
        world.run(1.2)  # within a second it has been looked after
        print(json.dumps(sorted(inherited() - before)), flush=True)
