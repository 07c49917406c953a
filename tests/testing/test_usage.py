"""What is measured as the memory in use: a leak shows in it, whatever else comes and goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.testing.conformance import resources

FREED_BELOW = """
for _ in range(2):  # glibc takes blocks of this size from its heap once one has been freed
    freed = [b"x" * (1300 << 10) for _ in range(100)]
    above = [bytes(600) for _ in range(1000)]
    del freed
"""
FREED_AT_THE_END = """
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()  # with one thread only, there is one heap only
del (big := [b"x" * (30 << 20)])[:]  # glibc keeps twice as much at the end of a heap from now on
try:
    b"x" * (1 << 46)  # now this thread has another heap
except MemoryError:
    pass
del (freed := [b"x" * (1 << 20) for _ in range(50)])[:]
"""
FILE = """
with open(sys.argv[1], "rb") as f:
    library = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
assert not any(library[::mmap.PAGESIZE])  # now they are in memory
"""
LEAK = """
before = resident()
kept = [b"x" * (1300 << 10) for _ in range(14)]
if library:
    library.madvise(mmap.MADV_DONTNEED)
print(resident() - before)
"""


@pytest.mark.parametrize(
    "first", [FREED_BELOW, FREED_AT_THE_END, FILE], ids=["freed below", "freed at the end", "file"]
)
def test_what_goes_meanwhile_hides_no_leak(first: str, tmp_path: Path) -> None:
    """What an allocator keeps would serve it, and pages of files are taken away by a system that is short of memory."""
    program = "import mmap, sys, threading\nfrom kvxfer.testing.usage import resident\nlibrary = None\n" + first + LEAK
    (tmp_path / "library").write_bytes(bytes(32 << 20))
    command = [sys.executable, "-c", program, str(tmp_path / "library")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(said.stdout) > 16 << 20


def test_what_others_give_back_meanwhile_hides_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ends late gives back its staging memory, say."""
    kept, staging = [100 << 20], [64 << 20]

    def rounds(count: int) -> None:
        kept.append(count << 20)
        staging.clear()

    monkeypatch.setattr(resources, "resident", lambda: sum(kept) + sum(staging))
    assert resources._lost(rounds, 20) == 20 << 20
