"""What authors of back ends build on: a base class, tables of memory, endpoints, wake-ups and more.

A back end is a class derived from ``Base``, which keeps the parts of ``kvxfer.transport.contract`` that are the same for
all; what is left to write is what the library is about. Each other module stands for itself, and a back end takes of
them what it needs:

- ``endpoint``: an endpoint as bytes that are checked when they are read, and the token that it carries.
- ``options``, ``listening``: options as a user writes them, and those of back ends that listen on a port.
- ``memories``: registered memory by number, and flat offsets turned into addresses.
- ``cursor``, ``runs``: the bytes of a batch, piece by piece; its runs, cut where they are too long.
- ``door``: a Unix socket at which peers of this host connect, and whoever has done so and not said yet what for.
- ``wakeup``: one descriptor for several reasons to call ``poll``.
- ``liveness``: how the two ends of a link on one host know of each other's end, and tell each other what else there is.
- ``host``, ``ports``: where a process runs, and which ports it has open.
- ``environment``: variables that a library looks at while it is called, and nobody else.
- ``ucx``: settings with which a UCX opens ports only where it shall.
"""

from kvxfer.backend.base import Base
from kvxfer.backend.cursor import RunCursor
from kvxfer.backend.endpoint import EndpointBase
from kvxfer.backend.liveness import Liveness, LivenessLinks
from kvxfer.backend.memories import Memories
from kvxfer.backend.wakeup import Timer, Wakeup
from kvxfer.memory.pool import CopyPool

__all__ = ["Base", "CopyPool", "EndpointBase", "Liveness", "LivenessLinks", "Memories", "RunCursor", "Timer", "Wakeup"]
