"""The tcp back end keeps the contract, and stands up to strangers and bad peers."""

from kvxfer.testing import ConformanceSuite
from kvxfer_tcp import TcpTransport


class TestTcp(ConformanceSuite):
    backend = TcpTransport
    rounds = 1000
