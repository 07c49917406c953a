"""Same-host back end: copies CPU memory of another process in one vectored system call, or through shared memory."""

from kvxfer_cma.transport import CmaTransport

__all__ = ["CmaTransport"]
