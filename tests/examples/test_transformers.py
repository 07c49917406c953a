"""The example of transformers, as its page and the README run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require

HERE = Path(__file__).parents[2] / "examples" / "transformers"

REFUSED = """
from exchange import Exchange
from model import make_model, prompts
from transformers import AutoModelForCausalLM, MistralConfig
from kvxfer import Config, KvxferError

model, (ids, *_) = make_model(), prompts()
# A lease is waited for: who has asked with another digest may be wrong.
here, there = Exchange(model, "here", Config(lease=8.0)), Exchange(model, "there")
ticket = here.offer(model(ids, use_cache=True)[here.argument], ids[0])
try:
    there.fetch(ticket, ids[0] // 2)
except KvxferError as e:
    print(e.kind.value)
there.serve()
there.fetch(here.offer(model(ids, use_cache=True)[here.argument], ids[0]), ids[0])
here.serve()
sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
try:
    Exchange(AutoModelForCausalLM.from_config(MistralConfig(sliding_window=8, **sizes)), "window")
except ValueError as e:
    print(e)
for exchange in (here, there):
    assert len(exchange.free) == 256
    exchange.close()
"""


@pytest.fixture(autouse=True)
def transformers() -> None:
    require("transformers")


@pytest.mark.slow  # each imports torch and transformers
def test_two_processes_make_the_tokens_of_a_plain_run() -> None:
    command = f"{sys.executable} -W ignore prefill.py | {sys.executable} -W ignore decode.py"
    done = subprocess.run(command, shell=True, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [f"{tokens} tokens fetched, the answer is a plain run's" for tokens in (300, 17, 64)]
    assert done.stdout.splitlines() == said, done.stderr


def test_another_prompt_and_a_window_are_refused_and_no_block_is_lost() -> None:
    command = [sys.executable, "-W", "ignore", "-c", REFUSED]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "digest_differs" and "this example moves full attention only" in second
