"""The NCCL back end over its CPU twin: the contract, and how it stands up to what NCCL cannot do by itself."""

from kvxfer.testing import ConformanceSuite
from kvxfer_nccl.twin import TwinTransport


class TestTwin(ConformanceSuite):
    backend = TwinTransport
