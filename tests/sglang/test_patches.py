"""The patches on SGLang's page are of the SGLang that is here."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require
from tests.sglang import overlay

PAGE = Path(__file__).parents[2] / "docs" / "sglang.md"
PATCHES = dict(re.findall(r'^```diff title="(.*?)"\n(.*?)^```$', PAGE.read_text(), re.M | re.S))


@pytest.mark.parametrize("title", PATCHES)
def test_a_patch_applies(title: str) -> None:
    require("sglang")
    if shutil.which("patch") is None:
        pytest.skip("there is no program patch")
    command = ["patch", "-p2", "--dry-run", "--fuzz=0", "-d", str(overlay.FOLDER)]
    done = subprocess.run(command, input=PATCHES[title], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout + done.stderr
