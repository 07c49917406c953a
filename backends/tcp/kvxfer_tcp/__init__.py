"""TCP back end for kvxfer: READ of CPU memory, straight from and to where it lies, between any two hosts."""

from kvxfer_tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
