"""ZeroMQ back end for kvxfer: SEND and RECV of CPU memory over TCP or a Unix socket."""

from kvxfer_zmq.transport import ZmqTransport

__all__ = ["ZmqTransport"]
