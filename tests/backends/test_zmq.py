"""The zmq back end keeps the contract, over TCP and over Unix sockets."""

from typing import Any, ClassVar

from kvxfer.testing import ConformanceSuite
from kvxfer_zmq import ZmqTransport


class TestTcp(ConformanceSuite):
    backend = ZmqTransport


class TestIpc(ConformanceSuite):
    backend = ZmqTransport
    options: ClassVar[dict[str, Any]] = {"protocol": "ipc"}
