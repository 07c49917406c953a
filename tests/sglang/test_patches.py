"""The patches that SGLang would need are of the SGLang that is here."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require
from tests.sglang import overlay

PATCHES = sorted((Path(__file__).parents[2] / "connectors" / "sglang" / "patches").glob("*.diff"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies(patch: Path) -> None:
    require("sglang")
    if shutil.which("patch") is None:
        pytest.skip("there is no program patch")
    command = ["patch", "-p2", "--dry-run", "--fuzz=0", "-d", str(overlay.FOLDER)]
    done = subprocess.run(command, input=patch.read_text(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout + done.stderr
