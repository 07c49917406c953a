"""What a server with all its processes holds of the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import psutil

__all__ = ["ProcessResources", "resources_of"]


@dataclass(frozen=True)
class ProcessResources:
    """Sums over all processes of a server: resident bytes, threads, open file descriptors."""

    resident: int
    threads: int
    descriptors: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def growth(self, before: ProcessResources, resident: int, descriptors: int) -> list[str]:
        """Return what is more than it was `before`, beyond these allowances.

        Threads get none beyond one a peer that came.
        """
        found = []
        if self.resident > before.resident + resident:
            found.append(f"{(self.resident - before.resident) / 2**20:.0f} MiB more resident memory")
        if self.threads > before.threads + 2:
            found.append(f"{self.threads - before.threads} more threads")
        if self.descriptors > before.descriptors + descriptors:
            found.append(f"{self.descriptors - before.descriptors} more file descriptors")
        return found


def resources_of(pid: int) -> ProcessResources:
    """Return what a process and all its descendants use.

    Raises:
        psutil.NoSuchProcess: It has ended.
    """
    top = psutil.Process(pid)
    processes = [top, *top.children(recursive=True)]
    return ProcessResources(
        sum(p.memory_info().rss for p in processes),
        sum(p.num_threads() for p in processes),
        sum(p.num_fds() for p in processes),
    )
