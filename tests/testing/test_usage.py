"""What is counted as memory in use."""

from __future__ import annotations

import subprocess
import sys

import pytest

AFTER_A_FAILURE = """
import threading
from kvxfer.testing.usage import resident

done = threading.Event()
threading.Thread(target=done.wait).start()  # with one thread only, there is one heap only
del (big := [b"x" * (30 << 20)])[:]  # glibc keeps twice as much at the end of a heap from now on
try:
    b"x" * (1 << 46)  # now this thread has another heap
except MemoryError:
    pass
del (freed := [b"x" * (1 << 20) for _ in range(MiB)])[:]
before = resident()
kept = [b"x" * (1 << 20) for _ in range(18)]
print(resident() - before)
done.set()
"""


@pytest.mark.parametrize("mib", [20, 50, 100])
def test_what_a_heap_keeps_at_its_end_hides_no_leak(mib: int) -> None:
    """In a thread for which there was no memory once, as in a test of that."""
    script = AFTER_A_FAILURE.replace("MiB", str(mib))
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(said) > 16 << 20
