"""A process with both ends of a link over a back end, which says which of its sockets a program gets that it starts.

Usage: ``python -m tests.backends.inheriting BACKEND OPTIONS``, the options as JSON. Each back end has a process of its own,
since not all of them can share one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np

from kvxfer.geometry.region import Region
from kvxfer.transport import Batch, Transport, Verb, registry

NBYTES = 1 << 20
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


def one(n: int) -> np.ndarray:
    return np.array([n], np.int64)


def move(a: Transport, b: Transport, to_b: int, to_a: int) -> None:
    """Move bytes from one to the other, or back."""
    verbs = a.capabilities.verbs
    if Verb.SEND in verbs:
        b.submit(Batch(Verb.RECV, to_a, 0, one(NBYTES), one(0), stream=1))
        a.submit(Batch(Verb.SEND, to_b, 0, one(NBYTES), one(0), stream=1))
    else:
        verb = Verb.WRITE if Verb.WRITE in verbs else Verb.READ
        a.submit(Batch(verb, to_b, 0, one(NBYTES), one(0), 0, one(0)))
    ended, until = [], time.monotonic() + 30
    while not ended and time.monotonic() < until:
        ended += a.poll()
        b.poll()
        time.sleep(0.001)
    assert [e.error for e in ended] == [None]
    quiet = time.monotonic() + 1.2  # within a second it has been looked after
    while time.monotonic() < quiet:
        a.poll()
        b.poll()
        time.sleep(0.01)


def main(backend: str, options: str) -> None:
    before = inherited()
    kind = registry.load(backend)
    a, b = (kind(name, json.loads(options)) for name in "ab")
    memory = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
    for end, array in zip((a, b), memory, strict=True):
        end.register((Region(array.ctypes.data, NBYTES),))
    of_a, of_b = a.endpoint(), b.endpoint()
    to_b, to_a = a.connect(of_a, of_b), b.connect(of_b, of_a)
    move(a, b, to_b, to_a)
    print(json.dumps(sorted(inherited() - before)), flush=True)
    a.close()
    b.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
