"""The paged engine runs as it stands: prefill on two ranks, decode on one, the tokens of one engine alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "paged_engine"


@pytest.mark.timeout(240)
def test_two_engines_give_the_tokens_of_one() -> None:
    done = subprocess.run([sys.executable, EXAMPLE / "engine.py"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "12 answers are those of one engine alone" in said
    assert "'loaded': 12" in said, "the decode engine computed prompts itself"
    assert said.count("'preempted'") == 2 and said.count("'cached'") == 2, "too easy: nothing was preempted or cached"


@pytest.mark.timeout(240)
def test_conversations_load_their_history_and_give_the_same_tokens() -> None:
    program = EXAMPLE.with_name("paged_conversation") / "conversation.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = re.search(r"of (\d+) histories (\d+) tokens were loaded", done.stdout)
    assert found is not None and "12 answers are those of one engine alone" in done.stdout
    requests, loaded = map(int, found.groups())
    assert requests == 8 and loaded >= 8 * 64, "the prefill engine computed histories itself"
