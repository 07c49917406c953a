"""The tutorials' programs run as they stand there, and their commands are what the project has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial"
BLOCK = re.compile(r"```(\w+)(?: title=\"(.*?)\")?\n(.*?)```", re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Return the title and the text of each block in that language."""
    return [(title, text) for lang, title, text in BLOCK.findall((TUTORIAL / page).read_text()) if lang == language]


def test_the_first_transfer_delivers(tmp_path: Path) -> None:
    runs_as_it_says("first-transfer.md", "prefill.py", "decode.py", tmp_path)


def test_the_conversation_goes_on_elsewhere(tmp_path: Path) -> None:
    runs_as_it_says("conversation.md", "decode.py", "prefill.py", tmp_path)


def runs_as_it_says(page: str, first: str, second: str, folder: Path) -> None:
    """Save a page's programs, run the two of its pipe, and compare what the second prints."""
    for title, text in blocks(page, "python"):
        (folder / title).write_text(text)
    (_, command) = blocks(page, "bash")[-1]
    assert command.split() == ["python", first, "|", "python", second]
    before = subprocess.Popen([sys.executable, first], cwd=folder, stdout=subprocess.PIPE)
    try:
        after = subprocess.run(
            [sys.executable, second], cwd=folder, stdin=before.stdout, capture_output=True, text=True, timeout=300
        )
        assert after.returncode == 0, after.stderr
        assert after.stdout == blocks(page, "text")[0][1]
        assert before.wait(30) == 0
    finally:
        before.kill()
        before.wait()
        if before.stdout:
            before.stdout.close()


def test_two_engines_connect_as_the_page_says() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "connect-an-engine.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loaded 39 tokens\n"


def test_the_commands_for_vllm_are_there() -> None:
    commands = "\n".join(text for _, text in blocks("vllm.md", "bash"))
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)", commands, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
    demo = (ROOT / "connectors/vllm/kvxfer_vllm/demo/command.py").read_text()
    (arguments,) = re.findall(r'ARGS="(.*?)"', commands)
    for option in re.findall(r"--([\w-]+)", arguments):
        assert re.search(rf"^    {option.replace('-', '_')}: ", demo, re.M), option
    for config in re.findall(r"--kv-transfer-config '(.*?)'", commands, re.DOTALL):
        assert json.loads(config)["kv_connector"] == "KVXferConnector"
    assert all(json.loads(text) for _, text in blocks("vllm.md", "json"))
