"""The programs on pages run as they are printed there, and commands on pages are what the project has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(\w+)(?: title=\"(.*?)\")?\n(.*?)```", re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Return the title and the text of each block in that language."""
    return [(title, text) for lang, title, text in BLOCK.findall((ROOT / page).read_text()) if lang == language]


PROGRAMS = {
    ("README.md", ""): "",
    ("docs/library.md", ""): "moved",
    ("docs/connect-an-engine.md", ""): "loaded 39 tokens\n",
    ("docs/connect-an-engine.md", "two simulated engines"): "",
    ("docs/connect-an-engine.md", "groups"): "",
    ("docs/connect-an-engine.md", "a row for each request"): "",
    ("docs/connect-an-engine.md", "holds"): "",
    ("docs/connect-an-engine.md", "a pool for each group"): "",
}
"""By page and title: what each prints, at least."""


@pytest.mark.parametrize("program", PROGRAMS, ids=" ".join)
def test_a_program_runs(program: tuple[str, str]) -> None:
    page, title = program
    (text,) = [text for named, text in blocks(page, "python") if named == title]
    if title in ("groups", "a row for each request"):
        text += "\ncache.check()\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert PROGRAMS[program] in done.stdout


@pytest.mark.parametrize(
    ("page", "first", "second"),
    [("first-transfer.md", "prefill.py", "decode.py"), ("conversation.md", "decode.py", "prefill.py")],
)
def test_a_tutorial_s_pipe_prints_what_it_says(page: str, first: str, second: str, tmp_path: Path) -> None:
    page = f"docs/tutorial/{page}"
    for title, text in blocks(page, "python"):
        (tmp_path / title).write_text(text)
    (_, command) = blocks(page, "bash")[-1]
    assert command.split() == ["python", first, "|", "python", second]
    there = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks(page, "text")[0][1]


def test_the_commands_for_vllm_are_there() -> None:
    page = "docs/tutorial/vllm.md"
    commands = "\n".join(text for _, text in blocks(page, "bash"))
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)", commands, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
    demo = (ROOT / "connectors/vllm/kvxfer_vllm/demo/command.py").read_text()
    (arguments,) = re.findall(r'ARGS="(.*?)"', commands)
    for option in re.findall(r"--([\w-]+)", arguments):
        assert re.search(rf"^    {option.replace('-', '_')}: ", demo, re.M), option
    for config in re.findall(r"--kv-transfer-config '(.*?)'", commands, re.DOTALL):
        assert json.loads(config)["kv_connector"] == "KVXferConnector"
    assert all(json.loads(text) for _, text in blocks(page, "json"))
