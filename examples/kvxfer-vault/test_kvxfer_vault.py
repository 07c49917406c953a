"""The suite for it: all there is to test in a kind of memory."""

from kvxfer_vault import VaultSpace

from kvxfer.testing import SpaceSuite


class TestVault(SpaceSuite):
    """Each test is a rule of the contract."""

    space = VaultSpace
    device = "vault:0"
