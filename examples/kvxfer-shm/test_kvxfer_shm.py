"""The suite for it: all there is to test in a back end that does nothing else."""

from kvxfer_shm import ShmTransport

from kvxfer.testing import ConformanceSuite


class TestShm(ConformanceSuite):
    """Each test is a rule of the contract."""

    backend = ShmTransport
