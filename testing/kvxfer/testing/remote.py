"""Objects in processes of their own, called over a pipe."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from kvxfer import errors
from kvxfer.errors import KvxferError
from kvxfer.threads import without_interrupts

STOP_S = 60.0

_forks = mp.get_context("forkserver")
"""Processes are forked from one that has imported what engines need: new interpreters would each have to import that again."""
_forks.set_forkserver_preload(["kvxfer.testing.engine", "kvxfer.testing.participant"])

_begun: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Kill what is left when this process ends: Python's own way waits for each, and one that is stopped does not end by a request."""
    for process in list(_begun):
        if process.is_alive():
            process.kill()


def apart(serve: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that calls this function, with the environment and the standard error of this one; return it.

    What libraries print, as UCX does about peers that are gone, goes to standard error, because standard output is the benchmark's.
    """
    errors = Connection(os.dup(2), readable=False)
    process = _forks.Process(target=_begin, args=(serve, args, dict(os.environ), errors), daemon=True)
    with without_interrupts():
        process.start()
    _begun.add(process)
    errors.close()
    return process


def _begin(
    serve: Callable[..., None], args: tuple[Any, ...], environment: Mapping[str, str], errors: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(errors.fileno(), stream)
    errors.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once, without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    serve(*args)


def _received(served: Any, pipe: Connection) -> Any:
    """Return the next call."""
    return pipe.recv()


def _called(served: Any, words: tuple[Any, ...], named: dict[str, Any]) -> Any:
    method, *arguments = words
    found = getattr(served, method)
    return found(*arguments, **named) if callable(found) else found


def _serve(
    make: Callable[..., Any], args: tuple[Any, ...], pipe: Connection, next_call: Callable[[Any, Connection], Any]
) -> None:
    """Serve calls until ``None``. Each is (arguments, named ones), the method first, and is answered with (kind of error, value)."""

    def answer(act: Callable[[], Any], tells: bool = True) -> Any:
        try:
            value = act()
        except Exception as e:
            if not isinstance(e, KvxferError):  # such an error says what happened and what to do
                traceback.print_exc()
            return pipe.send((type(e).__name__, str(e)))
        pipe.send((None, value if tells else None))
        return value

    with contextlib.suppress(EOFError, BrokenPipeError):  # our parent is gone
        served = answer(partial(make, *args), tells=False)
        while served is not None and (call := next_call(served, pipe)) is not None:
            answer(partial(_called, served, *call))
        if served is not None:
            served.close()


class Remote:
    """The object that ``make(*args)`` returns, made in a new process while this one goes on. It needs a method ``close``.

    ``name`` is what error messages call it, and ``process`` the process. ``next_call`` waits there for a call, given the object and the
    pipe.
    """

    answer_s = 180.0
    """Seconds after which a process that does not answer has hung."""

    def __init__(
        self, name: str, make: Callable[..., Any], *args: Any, next_call: Callable[[Any, Connection], Any] = _received
    ) -> None:
        self.name = name
        self._pipe, theirs = mp.Pipe()
        self.process = apart(_serve, make, args, theirs, next_call)
        theirs.close()
        self._made = False

    def wait(self) -> None:
        """Wait until the object is made.

        Raises:
            KvxferError: It could not be made, or not in time.
        """
        if not self._made:
            self._made = True
            self._answer()

    def send(self, *call: Any, **named: Any) -> None:
        """Call a method, ``(name, *arguments)``, or ask for an attribute, without waiting for the answer."""
        self._pipe.send((call, named))

    def get(self) -> Any:
        """Return the answer to the oldest ``send``.

        Raises:
            KvxferError: The call failed or took too long, or the process died.
        """
        self.wait()
        return self._answer()

    def _answer(self) -> Any:
        if not self._comes():
            raise KvxferError(f"the {self.name} did not answer within {self.answer_s:g} s")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(10)
            raise KvxferError(f"the process of the {self.name} died (exit status {self.process.exitcode})") from None
        if kind is not None:
            raise self._error(kind, value)
        return value

    def _comes(self) -> bool:
        """Wait for an answer, and say whether it is there in time."""
        return self._pipe.poll(self.answer_s)

    def _error(self, kind: str, text: str) -> Exception:
        """Return what is raised for an error of this class over there."""
        return KvxferError(f"the {self.name} failed: {'' if hasattr(errors, kind) else f'{kind}: '}{text}")

    def __call__(self, *call: Any, **named: Any) -> Any:
        self.send(*call, **named)
        return self.get()

    def ready(self, timeout: float) -> bool:
        """Wait for the answer to the oldest ``send``, and say whether it is there."""
        return self._pipe.poll(timeout)

    def stop(self) -> None:
        """Stop the process until ``resume``, as a debugger or a frozen host would, and wait until it has stopped.

        Raises:
            KvxferError: It has not, within ``STOP_S``.
        """
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + STOP_S
        while not self._stands():
            if time.monotonic() > deadline:
                raise KvxferError(f"the process of the {self.name} did not stand still within {STOP_S:g} s of SIGSTOP")
            time.sleep(0.001)

    def resume(self) -> None:
        """Let the process continue after ``stop``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, number)

    def _stands(self) -> bool:
        """Whether all of its threads have stopped, or it has ended."""
        try:
            threads = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
            return all(thread.read_text().rpartition(") ")[2][0] == "T" for thread in threads)
        except OSError:
            return False  # one has ended meanwhile

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it; after an interrupt, kill it, because a call that it is in could take minutes."""
        if kind is None or issubclass(kind, Exception):
            self.close()
        else:
            self.kill()

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def close(self) -> None:
        """Have the object close, and wait until its process ends."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()
