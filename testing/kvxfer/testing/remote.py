"""Objects in processes of their own, called over a pipe."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import signal
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from kvxfer.errors import KvxferError

ANSWER_S = 180.0

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
    serve(*args)


def _serve(make: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    """Serve requests until ``None``. Each is (arguments, named ones), the method first, and is answered with (ok, value)."""
    try:
        served = make(*args)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            (method, *arguments), named = call
            found = getattr(served, method)
            pipe.send((True, found(*arguments, **named) if callable(found) else found))
        served.close()
    except EOFError:
        pass  # our parent is gone
    except KvxferError as e:  # says what happened and what to do, without a traceback
        pipe.send((False, str(e)))
    except BaseException as e:
        pipe.send((False, f"{type(e).__name__}: {e}"))
        raise


class Remote:
    """The object that ``make(*args)`` returns, made in a new process while this one goes on. It needs a method ``close``.

    ``name`` is what error messages call it, and ``process`` the process.
    """

    def __init__(self, name: str, make: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self._pipe, theirs = mp.Pipe()
        self.process = apart(_serve, make, args, theirs)
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
        if not self._pipe.poll(ANSWER_S):
            raise KvxferError(f"the {self.name} did not answer within {ANSWER_S:g} s")
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            raise KvxferError(f"the process of the {self.name} died") from None
        if not ok:
            raise KvxferError(f"the {self.name} failed: {value}")
        return value

    def __call__(self, *call: Any, **named: Any) -> Any:
        self.send(*call, **named)
        return self.get()

    def ready(self, timeout: float) -> bool:
        """Wait for the answer to the oldest ``send``, and say whether it is there."""
        return self._pipe.poll(timeout)

    def stop(self) -> None:
        """Stop the process until ``resume``, as a debugger or a frozen host would."""
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process continue after ``stop``."""
        os.kill(self.process.pid or 0, signal.SIGCONT)

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
