"""The example of a space is small, keeps the contract, is on its page, and carries a paged engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from tests.memory.island import install

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kvxfer-vault"

sys.path.append(str(EXAMPLE))  # its own test file is the one on the page
import test_kvxfer_vault  # noqa: E402


class TestVault(test_kvxfer_vault.TestVault):
    pass


def test_the_page_shows_it() -> None:
    page = (ROOT / "docs" / "write-a-memory-space.md").read_text()
    assert "<!-- snippet: examples/kvxfer-vault/kvxfer_vault/__init__.py:space -->" in page
    assert "<!-- snippet: examples/kvxfer-vault/test_kvxfer_vault.py -->" in page
    source = (EXAMPLE / "kvxfer_vault" / "__init__.py").read_text()
    assert len(source.splitlines()) < 60, "it stays small"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "nixl"])
@pytest.mark.parametrize("places", [("vault", "cpu"), ("cpu", "vault"), ("vault", "vault")], ids=" to ".join)
def test_a_paged_engine_over_it_gives_the_right_tokens(backend: str, places: tuple[str, str], tmp_path: Path) -> None:
    if backend == "nixl":
        require("nixl")
    site = install(tmp_path, "vault", "kvxfer_vault:VaultSpace")
    path = os.pathsep.join([str(site), str(EXAMPLE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("paged_on_vault.py")), backend, *places],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0 and "6 answers are those of one engine alone" in ran.stdout, (
        ran.stdout + ran.stderr[-3000:]
    )
