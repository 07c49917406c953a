"""What docs/runbook.md tells people on call to type and to look at is there."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from kvxfer.cli.main import build
from tests.conftest import require

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runbook.md").read_text()
QUOTED = re.findall(r"`([^`]+)`", PAGE)
COMMANDS = sorted({text for text in QUOTED if text.startswith("kvxfer ")})
METRICS = sorted({text for text in QUOTED if re.fullmatch(r"(kvxfer_|vllm:)\w+", text)} - {"kvxfer_address"})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one(command: str) -> None:
    for placeholder, value in {"ENGINE...": "h:1", "ENGINE": "h:1", "DIRECTORY": "h:1", "NAME": "tcp"}.items():
        command = command.replace(placeholder, value)
    words = command.split()[1:]
    found = typer.main.get_command(build())
    context = found.make_context("kvxfer", [words.pop(0)], resilient_parsing=True)
    name = command.split()[1]
    found = found.get_command(context, name)  # type: ignore[attr-defined]
    if words and hasattr(found, "commands"):
        context = found.make_context(name, words[:1], resilient_parsing=True)
        found = found.get_command(context, words.pop(0))
    assert found is not None, command
    found.make_context(name, words)  # parses the arguments, and runs nothing


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_is_exported(metric: str) -> None:
    exported = "".join(path.read_text() for path in (ROOT / "connectors/vllm/kvxfer_vllm").glob("*.py"))
    if metric == "vllm:kv_cache_usage_perc":  # vLLM's own
        require("vllm")
        vllm = find_spec("vllm")  # which takes seconds to import
        assert vllm is not None and vllm.origin is not None
        exported = (Path(vllm.origin).parent / "v1/metrics/loggers.py").read_text()
    assert (
        f'"{metric.removesuffix("_total")}' in exported
        or f'{{NIXL}}{metric.removeprefix("vllm:nixl_").removesuffix("_total")}"' in exported
    )
