"""What authors of back ends build on: a base class, tables of memory, endpoints, wake-ups and more.

A back end is a class derived from ``Base``, which implements the parts of ``kvxfer.transport.contract`` that are the same for
all, so that only the calls of its library are left to write. The other modules are independent of each other; a back end
uses those that it needs:

- ``endpoint``: an endpoint as bytes that are checked when they are read, and the token that it carries.
- ``options``: a back end's options, and those of back ends that listen on a port.
- ``link``: one end of a link: made in time, up, broken; and the batches that wait in it.
- ``memories``: registered memory by number, and flat offsets turned into addresses.
- ``runs``: copy a batch piece by piece; cut runs that are too long.
- ``door``: a Unix socket that peers of this host connect to, and accepting where descriptors may run out.
- ``wakeup``: one descriptor for several reasons to call ``poll``, and how often to look at what does not report by itself.
- ``liveness``: tells each end of a link within one host that the other is on it, which process it is and whether that is alive,
  and carries short messages.
- ``introduction``: tells a process of this host, and no other, the address by which shared memory is reached; ``passed`` for what is long.
- ``process``: which process is at the other end of a Unix socket, as the kernel says.
- ``ports``: which ports a process has open.
- ``inheritance``: keeps the sockets that a library opens from programs that this process starts.
- ``environment``: environment variables set only while a library is called.
- ``ucx``: settings with which UCX opens no ports but those that the operator wants, and has no shared memory with peers of a network.
"""

from kvxfer.backend.base import Base
from kvxfer.backend.endpoint import EndpointBase
from kvxfer.backend.link import LinkBase, Submitted
from kvxfer.backend.liveness import Liveness, LivenessLinks
from kvxfer.backend.memories import Memories
from kvxfer.backend.runs import RunCursor
from kvxfer.backend.wakeup import Timer, Wakeup, look_again
from kvxfer.memory.pool import CopyPool

__all__ = [
    "Base",
    "CopyPool",
    "EndpointBase",
    "Submitted",
    "LinkBase",
    "Liveness",
    "LivenessLinks",
    "Memories",
    "RunCursor",
    "Timer",
    "Wakeup",
    "look_again",
]
