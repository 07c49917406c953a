"""The example of a space is small, keeps the contract, is on its page, and carries a paged engine."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kvxfer-vault"

sys.path.append(str(EXAMPLE))  # its own test file is the one on the page
import test_kvxfer_vault  # noqa: E402


class TestVault(test_kvxfer_vault.TestVault):
    pass
