"""Checksums of parts, on a thread of its own, so that neither the control thread nor a data thread waits while memory is read.

The control thread posts what is to be hashed and gets each answer through a callback. Peers take turns, because each may ask for
checksums of all that it reads. The thread starts with the first part, so that an agent whose links check nothing has no such thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from kvxfer import memory
from kvxfer.data.commands import ThreadDied
from kvxfer.errors import KvxferError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, CopyPlan, Planner, ShardAssignment
from kvxfer.geometry.assignment import head_range
from kvxfer.logs import logger
from kvxfer.memory.blame import space_error
from kvxfer.protocol.peer import NOBODY
from kvxfer.protocol.shares import Turns
from kvxfer.protocol.values import Hash, Hashed, PartRef
from kvxfer.threads import NamedThread
from kvxfer.values import NULL

log = logger("kvxfer.hasher")


class Hasher:
    """The thread that computes checksums. Only one thread may call its methods, except ``close``.

    ``post`` is called with one ``Hashed`` for each ``Hash``, on this object's thread or within ``cancel`` or ``close``; it must
    not block.
    """

    def __init__(self, cache: Cache, post: Callable[[Hashed | ThreadDied], None]) -> None:
        self._cache, self._post = cache, post
        self._waiting: dict[PartRef, Hash] = {}
        self._turns: Turns[Hashable, PartRef] = Turns()
        self._change = threading.Condition()
        self._closed = False
        self._thread = NamedThread(target=self._run, name="kvxfer-hash")
        self._started = False

    def get_ready(self, timeout: float) -> None:
        """Compile the code that reads the cache, so that no transfer waits for it; reads one block, and may take seconds.

        Raises:
            KvxferError: The memory cannot be read, or not within ``timeout`` seconds.
        """
        cache = self._cache
        whole = [ShardAssignment(i, i, v.layers, *head_range(v)) for i, v in enumerate(cache.views)]
        token = max((v.held.index * v.held.span for v in cache.views), default=0)  # a token that is here
        first = [[0, *[NULL] * (token // group.block_tokens)] for group in cache.groups]
        one = Planner(cache, cache, whole).plan(first, first, 0, token + 1)
        failed: list[BaseException] = []

        def read() -> None:
            try:
                _sum(memory.space(cache.regions), one, "source")
            except BaseException as e:
                failed.append(e)

        reader = NamedThread(target=read, name="kvxfer-ready")  # because a device that hangs cannot be interrupted
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise KvxferError(
                f"memory of {cache.regions[0].device} could not be read within {timeout:g} s, for a checksum of one block; "
                "look whether the device works, or set 'integrity' to 'off'"
            )
        if failed:
            raise failed[0]

    def hash(self, action: Hash) -> None:
        """Queue a part to be hashed."""
        with self._change:
            self._waiting[action.ref] = action
            self._turns.add(_owner(action), action.ref)
            self._change.notify()
        if not self._started:
            self._thread.start()
            self._started = True

    def cancel(self, ref: PartRef) -> None:
        """Drop a part that is no longer needed, if its hashing has not begun."""
        with self._change:
            action = self._waiting.pop(ref, None)
            if action is not None:
                self._turns.remove(_owner(action), ref)
        if action is not None:
            self._post(Hashed(ref, failure=Failure(FailureKind.CANCELLED, "it was given up")))

    def close(self, timeout: float) -> None:
        """Begin no more parts, and wait for one that has begun for up to ``timeout`` seconds (the thread is a daemon)."""
        for ref in list(self._waiting):
            self.cancel(ref)
        with self._change:
            self._closed = True
            self._change.notify()
        if self._started:
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.error("a checksum was not done within %g s; its thread is abandoned", timeout)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            self._post(ThreadDied(Failure(FailureKind.BACKEND_FAILED, f"the thread for checksums has died: {e!r}")))
            raise

    def _serve(self) -> None:
        space: memory.Space | None = None
        while (action := self._next()) is not None:
            ref = action.ref
            try:
                space = space or memory.space(self._cache.regions)
                done = Hashed(ref, _sum(space, action.plan, action.side))
            except BaseException as e:
                log.exception("a checksum failed")
                done = Hashed(ref, failure=Failure.of(e))
            self._post(done)

    def _next(self) -> Hash | None:
        """Wait for the part whose turn it is; ``None`` at the end."""
        with self._change:
            self._change.wait_for(lambda: self._closed or self._turns)
            ref = self._turns.next()
            return None if ref is None else self._waiting.pop(ref)


def _owner(action: Hash) -> Hashable:
    """Return whose turn a part takes: a consumer's, whatever links and names it has, or that of the link over which it came."""
    return action.ref.link if action.owner == NOBODY else action.owner.levels[0]


def _sum(space: memory.Space, plan: CopyPlan, side: memory.Side) -> int:
    """Return a checksum, once it is computed."""
    try:
        return space.checksum(plan, side).value
    except Exception as e:
        raise space_error(type(space), space.device, "checksum", e) from e
