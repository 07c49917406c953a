"""Check off the control thread what takes time: hellos, and the descriptors that directories answer with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvxfer.control.loop import Step
from kvxfer.control.worker import Worker
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.logs import logger
from kvxfer.protocol.values import Action

__all__ = ["Examiner"]

log = logger("kvxfer.agent")

T = TypeVar("T")


class Examiner:
    """A thread that does jobs one after the other, and hands their results to the control thread, by ``do``.

    At most ``most`` jobs may wait.
    """

    def __init__(self, name: str, most: int, do: Callable[[Step], None]) -> None:
        self._worker, self._do = Worker(name, most), do

    def submit(self, weight: int, job: Callable[[], T], done: Callable[[T | Failure, float], list[Action]]) -> bool:
        """Queue a job, unless too many wait; return whether it will be done.

        ``weight`` is its approximate cost, in any unit. ``done`` is called on the control thread with the job's result, or a
        ``Failure`` that says why there is none, and with the time.
        """
        return self._worker.submit(weight, partial(self._examine, job, done))

    def close(self, timeout: float) -> None:
        """Begin no more jobs, and wait for one that has begun for up to ``timeout`` seconds. Idempotent."""
        self._worker.close(timeout)

    def _examine(self, job: Callable[[], T], done: Callable[[T | Failure, float], list[Action]]) -> None:
        found: T | Failure
        try:
            found = job()
        except (PeerError, ValueError) as e:
            found = Failure.of(e, FailureKind.INCOMPATIBLE)
        except Exception as e:
            log.exception("something could not be examined")
            found = Failure(FailureKind.MISUSE, f"it could not be examined: {e!r}")
        self._do(partial(done, found))
